"""Text in, text out: the objects that laconic.load returns, and chats with them."""
