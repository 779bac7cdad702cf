"""What every arm is asked to do: the same prompts, as token ids, and the same number of new tokens.

Token ids, because arms tokenize differently (or not at all) and only decoding is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NEW_TOKENS = 64
STREAMS = (1, 8, 32)
SINGLE_PROMPTS = 16

_QUESTIONS = (
    "Explain why the sky is blue to a child.",
    "Write a short note to a neighbour about a lost cat.",
    "What should I check before buying a used bicycle?",
    "Describe how bread is baked, step by step.",
    "Give me three ideas for a rainy weekend.",
    "How do vaccines work?",
    "Summarize the water cycle in a few sentences.",
    "What is the difference between weather and climate?",
    "Write a polite email that asks for a deadline extension.",
    "Why do leaves change colour in autumn?",
    "Suggest a simple exercise plan for beginners.",
    "How does a refrigerator keep food cold?",
    "What makes a good story?",
    "Tell me about the history of the bicycle.",
    "How can I remember names better?",
    "Compare tea and coffee.",
    "What is a prime number, and why do people care about them?",
    "Explain compound interest with an example.",
    "How do bees make honey?",
    "Give tips for a first job interview.",
    "What causes thunder?",
    "How is paper recycled?",
    "Describe the life of a lighthouse keeper.",
    "What is the purpose of a constitution?",
    "How do I plan a small vegetable garden?",
    "Why is sleep important?",
    "Explain what a computer program is.",
    "What are the parts of a flower?",
    "How does a sailing boat move against the wind?",
    "Write a four line poem about the sea.",
    "What is the role of a central bank?",
    "How do glaciers shape a landscape?",
)

_CODE = """\
def count_words(text):
    counts = {}
    for word in text.split():
        word = word.lower()
        if word in counts:
            counts[word] += 1
        else:
            counts[word] = 1
    return counts


text = "the cat and the dog and the bird"
print(count_words(text))
"""

_COPY_REQUEST = f"Repeat this code exactly as it is, without any change:\n\n```python\n{_CODE}```"


@dataclass(frozen=True)
class Workload:
    """Prompts that are submitted at once."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = NEW_TOKENS

    @property
    def num_streams(self) -> int:
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        return self.num_streams * self.new_tokens

    @property
    def mean_context(self) -> float:
        """Tokens of context that an average decode step attends to, per sequence."""
        return sum(map(len, self.prompts)) / self.num_streams + self.new_tokens / 2


@dataclass(frozen=True)
class WorkloadSet:
    """The columns of the table."""

    chat: tuple[Workload, ...]
    copy: Workload
    single: tuple[Workload, ...]
    """Chat prompts for one stream, one by one."""

    @property
    def all(self) -> tuple[Workload, ...]:
        return (*self.chat, self.copy)


def make_workloads(model: Path, *, streams: tuple[int, ...], new_tokens: int) -> WorkloadSet:
    """Tokenizes the prompts with the target's own tokenizer and chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> tuple[int, ...]:
        if not tokenizer.chat_template:
            return tuple(tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return tuple(ids)

    questions = [encode(question) for question in _QUESTIONS]
    chat = tuple(
        Workload(
            f"chat x{count}", tuple(questions[index % len(questions)] for index in range(count)), new_tokens
        )
        for count in streams
    )
    single = tuple(
        Workload(f"chat {number + 1}", (prompt,), new_tokens)
        for number, prompt in enumerate(questions[:SINGLE_PROMPTS])
    )
    return WorkloadSet(chat, Workload("copy x1", (encode(_COPY_REQUEST),), new_tokens), single)
