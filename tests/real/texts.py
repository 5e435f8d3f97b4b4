"""Texts that tokenizers disagree on: code, languages, numbers, white space, emoji, special tokens, and mixtures."""

import random

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
CODE = """import re
class Point:
    __slots__ = ("x", "y")

    def norm(self) -> float:
        return (self.x ** 2 + self.y ** 2) ** 0.5   # sqrt(3*3 + 4*4) == 5.0

for (int i = 0; i < 100; i++) {
\tif (a[i] != 0xFF && b[i] >= 1e-3) printf("%5d\\t%s\\n", i, names[i]);
}
SELECT id, count(*) FROM "user_table" WHERE created_at > '2024-01-01' GROUP BY 1;
<div class="row">&nbsp;<a href="/index.html?page=12#top">12</a></div>
fn main() -> Result<(), Box<dyn Error>> { let xs: Vec<u8> = vec![1, 2, 3]; Ok(()) }
\\frac{1}{2} \\sum_{i=1}^{n} x_i^2 \\leq 10^{-6}
""".splitlines(keepends=True)
FRAGMENTS = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u200b", "\ufeff",
    "0", "7", "42", "2024", "3.14", "1,000", "½", "Ⅷ", "²", "٣", "'s", "'LL", "don't", "I'm", "…", "—", "()", "{}",
    "==", "!=", "->", "::", "_", "__", "a", "The", " the", "ing", "Café", "e\u0301", "ﬁ", "ǅ", "𝒳", "\x00", "\x7f",
    "😀", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "❤️", "👍🏽", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>",
    "<|im_start", "|>", "<gh_stars>", "user\n", "assistant\n",
)  # fmt: skip


def build_texts(count: int = 2000) -> list[str]:
    """Return the texts, the same ones every time."""
    rng = random.Random(0)
    texts = [*SENTENCES, *FRAGMENTS, ""]
    while len(texts) < count:
        kind = rng.randrange(3)
        if kind == 0:
            start = rng.randrange(len(CODE))
            texts.append("".join(CODE[start : start + rng.randint(1, 4)])[rng.randint(0, 9) :])
        elif kind == 1:
            words = " ".join(rng.sample(SENTENCES, 2))
            start = rng.randrange(len(words))
            texts.append(words[start : start + rng.randint(5, 80)])
        else:
            texts.append("".join(rng.choices(FRAGMENTS, k=rng.randint(2, 12))))
    return texts
