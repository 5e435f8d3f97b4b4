"""2,000 texts that tokenizers disagree on: code, languages, numbers, white space, emoji, special tokens, and mixtures."""

import random

from tests.conftest import REPO

SENTENCES = (
    "The quick brown fox doesn't jump over the lazy dog's back, does it?",
    "Größe, Übermut und Straße: drei Wörter mit Umlauten – und 12,5 %.",
    "L'été dernier, où étais-tu ? À Besançon, peut-être…",
    "¿Dónde está el año 1999? ¡Aquí, señor!",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "敏捷的棕色狐狸跳过懒狗，共有3只。",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナも。",
    "다람쥐 헌 쳇바퀴에 타고파 2024년",
    "الثعلب البني السريع يقفز فوق الكلب ٣ مرات",
    "שועל חום מהיר קופץ מעל כלב עצלן",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर से कूदती है १२३",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "Tiếng Việt có rất nhiều dấu thanh",
    "1. First\n\n2. Second\n\n\n10. Tenth",
    "def f(x):\n    return x ** 2  # squares   5\n",
    "\tif (a[ 0]  !=  12e-3) { puts(\"%05d\\n\", 0x1F); }",
    "| a | 12 |\n|---|---:|\n|  7|  8 |",
    "https://example.org/a_b?c=1&d=%20#e  user@example.com",
)  # fmt: skip
FRAGMENTS = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u200b", "\ufeff", "0", "7", "42", "2024",
    "3.14", "1,000", "½", "Ⅷ", "²", "٣", "'s", "'LL", "don't", "I'm", "…", "—", "()", "{}", "==", "!=", "->", "::", "_", "__",
    "a", "The", " the", "ing", "Café", "e\u0301", "ﬁ", "ǅ", "😀", "👩‍👩‍👧‍👦", "🇩🇪", "❤️", "👍🏽", "𝒳", "\x00", "\x7f", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_start", "|>", "<gh_stars>", "user\n", "assistant\n",
)  # fmt: skip


def build_texts(count: int = 2000) -> list[str]:
    """Return the texts, the same ones every time."""
    rng = random.Random(0)
    lines = (REPO / "tests/real/texts.py").read_text(encoding="utf-8").splitlines(keepends=True)
    texts = [*SENTENCES, *FRAGMENTS, ""]
    while len(texts) < count:
        kind = rng.randrange(3)
        if kind == 0:
            start = rng.randrange(len(lines))
            texts.append("".join(lines[start : start + rng.randint(1, 4)]))
        elif kind == 1:
            words = " ".join(rng.sample(SENTENCES, 2))
            start = rng.randrange(len(words))
            texts.append(words[start : start + rng.randint(5, 80)])
        else:
            texts.append("".join(rng.choices(FRAGMENTS, k=rng.randint(2, 12))))
    return texts
