"""Questions for a model to answer, made without any text but its own and our few words.

A third the model writes: an instruct model goes on where its template opens the user's turn (Xu et
al. 2024, "Magpie", arXiv 2406.08464). Left alone it asks much the same again and again, so most of
these turns are begun for it, with a word of its vocabulary or a few of ours. A third are tasks on
texts, a third ask in many ways for many things that texts mention. The texts are its earlier
answers, and documents that it writes outside of any conversation from a random word on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from slipstream.config import SamplingParams
from slipstream.train.questions import Messages

_MARK = "@@@slipstream@@@"
_LONGEST = 200  # tokens of a question; one that goes on is thrown away
_DOCUMENT = 240  # tokens of a document
_SENTENCE = 60  # tokens of one in another language
_SAME_SHARE = 0.5  # of a question's words: one that says a few over and over teaches nothing
_STYLES = ((1.0, 1.0), (0.8, 0.95))  # temperature and top-p of what the model writes here

OPENINGS = (
    "who was the first",
    "who wrote",
    "what is the name of",
    "what does the word",
    "when did the",
    "where is",
    "how many",
    "which of the",
    "why do",
    "{name} has {few}",
    "{name} buys {some}",
    "A {role} earns",
    "If a train",
    "There are {many}",
    "A shop sells",
    "How much",
    "Write a",
    "Imagine",
    "Compare the",
    "Explain",
)
FOREIGN = {
    "German": ("Die Stadt", "Der Mann", "Es ist", "Das neue", "Wir haben", "In den"),
    "French": ("La ville", "Le gouvernement", "Il est", "Nous avons", "Dans les"),
    "Spanish": ("La ciudad", "El hombre", "Es una", "Los nuevos", "En el"),
    "Italian": ("La storia", "Il primo", "Nella"),
    "Portuguese": ("A cidade", "O homem", "Em uma"),
}
ON_TEXTS = (
    "Summarize: {text}",
    "Summarize this text in a few sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of the text above?",
    "Translate into {language}: {sentence}",
    "Translate this from {language} into English: {foreign}",
    "What does this mean in English? {foreign}",
    "Answer the question with the help of the passage.\nPassage: {text}\nQuestion: {question}",
    "Here are some notes.\n\n{text}\n\n{other}\n\nWith them, answer this: {question}",
    "Rewrite in plain words:\n\n{text}",
    "Correct any mistakes in this text and say what you changed:\n\n{text}",
    "Continue this text: {sentence}",
    "List the names, places and numbers in the following text.\n\n{text}",
    "Give the most important facts of this text as JSON.\n\n{text}",
    "Turn this into bullet points:\n\n{text}",
    "Find a title and three keywords for this text: {text}",
    "Repeat this text, but in the past tense: {text}",
    "Text one: {text}\n\nText two: {other}\n\nHow do they differ?",
    "{text}\n\nWhat does the text say about {subject}?",
)
ON_SUBJECTS = (
    "Write a short story about {subject}.",
    "Write a blog post of at most 200 words about {subject}.",
    "Write an email to a colleague about {subject}.",
    "Write eight lines of verse about {subject} and {thing}.",
    "Explain {subject} to a child.",
    "What is {subject}?",
    "How does {subject} work?",
    "Why does {subject} matter today?",
    "What led to {subject}, and what came of it?",
    "Tell me about the history of {subject}.",
    "Compare {subject} with {thing}.",
    "What speaks for {subject}, and what against it?",
    "Give me {few} tips about {subject}.",
    "Make a plan of {few} steps for {subject}.",
    "You are a {role}. A visitor asks you about {subject}. What do you say?",
    "Play the part of a {role} who talks to a friend about {subject}.",
    "Describe {subject} so that a {role} would enjoy reading it.",
    "A {role} has to decide between {subject} and {thing}. What should be considered?",
    "{name} has {many} {thing}, gives away {few} and buys {some} more. How many are left?",
    "A {role} earns {many} dollars an hour for {few} hours a day. How much is it in {some} days?",
    "There are {some} boxes with {many} {thing} in each. {few} are broken. How many can be used?",
    "Solve for x: {few}x + {some} = {many}. Show each step.",
    "What is {many} percent of {some}{few}0?",
    "{name} is older than {friend}, who is older than the {role}. Who is the youngest? Explain.",
    "Write a Python function that counts how often {thing} occurs in a list.",
    "Write a Python program that reads {few} numbers and prints the largest.",
    "Write a JavaScript function that returns every item longer than {some} letters.",
    "Write an SQL query for the {few} newest entries about {thing}.",
    "What does a {role} need to know about {subject}?",
    "Name {few} books or films about {subject} and say what each is about.",
)
_WORDS: dict[str, Sequence[str]] = {
    "role": ("teacher", "doctor", "gardener", "pirate", "farmer", "detective", "chef", "scientist"),
    "name": ("Maria", "Tom", "Aisha", "Kenji", "Olga"),
    "friend": ("Ben", "Lucia", "Ravi", "Nora", "Sam"),
}


@dataclass(frozen=True)
class _Begun:
    """What the model goes on with: after token ids (none: outside of any conversation) words."""

    ids: Sequence[int]
    words: str
    longest: int  # tokens of what it writes


def questions(llm: Any, count: int, seed: int, earlier: Sequence[str]) -> list[Messages]:
    """About ``count``, in an order that the seed decides. earlier: answers to earlier ones, in any
    order; as many as there are documents are asked about."""
    pick, third = random.Random(seed), count // 3
    words = _words(llm)
    turns = _turns(llm, third, words, pick)
    documents = [_Begun((), pick.choice(words), _DOCUMENT) for _ in range(count // 8 + 1)]
    languages = [pick.choice(list(FOREIGN)) for _ in range(count // 32 + 1)]
    sentences = [_Begun((), pick.choice(FOREIGN[name]), _SENTENCE) for name in languages]
    found = iter(_written(llm, [*turns, *documents, *sentences], pick))
    made = [text for text, ended in islice(found, third) if ended and _worth_asking(text)]
    texts = [text for text, _ in islice(found, len(documents))]
    texts += earlier[: len(documents)]
    foreign = [
        (name, _sentences(text)[0]) for name, (text, _) in zip(languages, found, strict=True)
    ]
    own = made or ["What is this about?"]
    for patterns in (ON_TEXTS, ON_SUBJECTS):
        for _ in range(third):
            question, sentence = pick.choice(own), pick.choice(foreign)
            made.append(fill(pick.choice(patterns), question, sentence, texts, pick))
    pick.shuffle(made)
    return [[{"role": "user", "content": question}] for question in made]


def opening(llm: Any) -> list[int]:
    """Token ids up to where a user's first words stand."""
    llm.chat_tokens([{"role": "user", "content": _MARK}])  # says what is wrong with the template
    text = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    return list(llm.tokenizer(text.split(_MARK)[0], add_special_tokens=False)["input_ids"])


def _turns(llm: Any, count: int, words: Sequence[str], pick: random.Random) -> list[_Begun]:
    """A quarter begin with nothing, a quarter with a word, half with a few words of ours."""
    ids, begun = opening(llm), []
    for _ in range(count):
        ours = _with_ours(pick.choice(OPENINGS), pick)
        begun.append(_Begun(ids, pick.choice(["", pick.choice(words), ours, ours]), _LONGEST))
    return begun


def _written(llm: Any, begun: Sequence[_Begun], pick: random.Random) -> list[tuple[str, bool]]:
    """Each with what the model makes of it, and whether that came to an end."""
    prompts, params = [], []
    for part in begun:
        words = llm.tokenizer(part.words, add_special_tokens=not part.ids)["input_ids"]
        prompts.append({"prompt_token_ids": [*part.ids, *words]})
        temperature, top_p = pick.choice(_STYLES)
        seed = pick.randrange(1 << 32)
        params.append(
            SamplingParams(temperature=temperature, top_p=top_p, max_tokens=part.longest, seed=seed)
        )
    outputs = [run.outputs[0] for run in llm.generate(prompts, params)]
    return [
        ((part.words + output.text).strip(), output.finish_reason == "stop")
        for part, output in zip(begun, outputs, strict=True)
    ]


def _words(llm: Any) -> list[str]:
    """Tokens that a text could begin with."""
    return sorted(t for t in llm.tokenizer.get_vocab() if re.fullmatch("[A-Z][a-z]+", t)) or ["A"]


def fill(
    pattern: str,
    question: str,
    foreign: tuple[str, str],
    texts: Sequence[str],
    pick: random.Random,
) -> str:
    """A pattern with its places filled from the question, a language and its sentence, the texts
    and a few words of ours."""
    text, other = pick.choice(texts).strip(), pick.choice(texts).strip()
    words = {
        "language": foreign[0],
        "foreign": foreign[1],
        "question": question,
        "text": text,
        "other": other,
        "sentence": pick.choice(_sentences(text)),
        "subject": _mentioned(text, pick),
        "thing": _mentioned(other, pick, longest=1),
    }
    return _with_ours(pattern, pick, **words)


def _with_ours(pattern: str, pick: random.Random, **words: str) -> str:
    """The pattern with words of ours and numbers in its places, beside those given."""
    ours = {key: pick.choice(choices) for key, choices in _WORDS.items()}
    numbers = {"few": (2, 9), "some": (3, 40), "many": (11, 400)}
    ours |= {key: str(pick.randint(*limits)) for key, limits in numbers.items()}
    return pattern.format(**ours | words)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def _mentioned(text: str, pick: random.Random, longest: int = 3) -> str:
    """Some neighbouring words of the text that may be about something."""
    runs = re.findall(r"[A-Za-z]{4,}(?: [A-Za-z]{4,})*", text)
    if not runs:
        return "the weather"
    words = pick.choice(runs).split()
    begin = pick.randrange(len(words))
    return " ".join(words[begin : begin + pick.randint(1, longest)])


def _worth_asking(text: str) -> bool:
    words = text.split()
    return len(words) >= 3 and len(set(words)) >= _SAME_SHARE * min(len(words), 50)
