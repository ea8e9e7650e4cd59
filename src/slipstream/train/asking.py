"""Questions for a model to answer, made without any text but its own and our few words.

A third is the model's: an instruct model goes on writing where its template opens the user's turn
(Xu et al. 2024, "Magpie", arXiv 2406.08464). Such questions are much alike and short. A third are
tasks on texts, its own earlier answers; a third ask in many ways for many things about what those
answers mention.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from slipstream.config import SamplingParams
from slipstream.train.questions import Messages

_MARK = "@@@slipstream@@@"
_LONGEST = 200  # tokens of a question; one that goes on is thrown away
_SAME_SHARE = 0.5  # of a question's words: one that says a few over and over teaches nothing

ON_TEXTS = (
    "Summarize: {text}",
    "Summarize this text in a few sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of the text above?",
    "Translate into {language}: {sentence}",
    "Translate this from {language} into English: {sentence}",
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
    "language": ("German", "French", "Spanish", "Italian", "Portuguese"),
    "role": ("teacher", "doctor", "gardener", "pirate", "farmer", "detective", "chef", "scientist"),
    "name": ("Maria", "Tom", "Aisha", "Kenji", "Olga"),
    "friend": ("Ben", "Lucia", "Ravi", "Nora", "Sam"),
}


def questions(llm: Any, count: int, seed: int, earlier: Sequence[str]) -> list[Messages]:
    """About ``count``, in an order that the seed decides. earlier: texts; without any, all
    questions are the model's own."""
    pick = random.Random(seed)
    third = count // 3
    made = own_questions(llm, third if earlier else count, seed)
    own = made or ["What is this about?"]
    for patterns in (ON_TEXTS, ON_SUBJECTS) if earlier else ():
        chosen = [(pick.choice(patterns), pick.choice(own)) for _ in range(third)]
        made = made + [fill(*pair, earlier, pick) for pair in chosen]
    pick.shuffle(made)
    return [[{"role": "user", "content": words}] for words in made]


def opening(llm: Any) -> list[int]:
    """Token ids up to where a user's first words stand."""
    llm.chat_tokens([{"role": "user", "content": _MARK}])  # says what is wrong with the template
    text = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    return list(llm.tokenizer(text.split(_MARK)[0], add_special_tokens=False)["input_ids"])


def own_questions(llm: Any, count: int, seed: int) -> list[str]:
    """Sampled from the target's empty user turn; fewer than ``count`` where what it wrote is empty,
    cut off or says one thing over and over."""
    head = {"prompt_token_ids": opening(llm)}
    params = [
        SamplingParams(temperature=1.0, max_tokens=_LONGEST, seed=seed + i) for i in range(count)
    ]
    found = [run.outputs[0] for run in llm.generate([head] * count, params)]
    return [
        output.text.strip()
        for output in found
        if output.finish_reason == "stop" and _worth_asking(output.text)
    ]


def fill(pattern: str, question: str, texts: Sequence[str], pick: random.Random) -> str:
    """A pattern with its places filled from the question, the texts and a few words of ours."""
    text, other = pick.choice(texts).strip(), pick.choice(texts).strip()
    words = {key: pick.choice(choices) for key, choices in _WORDS.items()}
    words |= {
        "question": question,
        "text": text,
        "other": other,
        "sentence": pick.choice(re.split(r"(?<=[.!?])\s+", text)),
        "subject": _mentioned(text, pick),
        "thing": _mentioned(other, pick, longest=1),
        "few": str(pick.randint(2, 9)),
        "some": str(pick.randint(3, 40)),
        "many": str(pick.randint(11, 400)),
    }
    return pattern.format(**words)


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
