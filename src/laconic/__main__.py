"""The command `laconic`, and `python -m laconic`, the module that torchrun starts."""

import os
import signal


def main() -> None:
    """Run the command line; Ctrl-C while it is imported exits with 130 and prints nothing."""
    is_default = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from laconic.cli import main as command_line  # which takes some tenths of a second

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line.main()


if __name__ == "__main__":
    main()
