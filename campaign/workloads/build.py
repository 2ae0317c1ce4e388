"""The shipped prompt packs, rebuilt byte for byte: `python -m campaign.workloads.build FOLDER`.

Original, plain text. `quickstart-chat`: questions of 40 to 90 tokens. `quickstart-copy`: a short JSON list
to be written out again with one change, so that an n-gram drafter finds most of the answer in the prompt.
`health`: eight short questions for the anchor. Token counts are those of SmolLM2's tokenizer.
"""

import json
import sys
from pathlib import Path

_CHAT = """\
A bakery sells bread in the morning and cake in the afternoon. The oven is small, and only one kind fits
at a time. Suggest an order of work for the day, and explain in plain words why it saves time.

My bicycle makes a clicking sound when I push hard on the left pedal, but not when I roll downhill. Name
three parts that could be loose, and say how I can check each of them at home without special tools.

Write a short letter to a neighbour whose dog barks early every morning. Be friendly and honest, say what
you would like to change, and offer one thing that you could do yourself to help.

A small library wants to know which of its books are read inside the building but never taken home.
Describe a simple way to count them for one month that needs no computer and very little work.

Explain to a ten year old child why ice floats on a lake in winter while a stone sinks at once. Use one
example from the kitchen, and end with a question that the child can try to answer.

I have rice, two eggs, half an onion, a carrot and some soy sauce. Describe a quick dinner for one person
in five steps, and mention which step goes wrong most often and how to avoid that.

Two friends share a car and want to split the cost in a fair way. One drives far but rarely, the other
drives every day but only a short way. Compare two ways of splitting, with a small example.

Describe the view from a train window on a rainy evening as the train leaves a large city and enters the
hills. Use the present tense, no more than six sentences, and do not mention any people.

A garden is ten metres long and four metres wide. Half of it lies in the shade of a wall after noon.
Decide where tomatoes, lettuce and mint should grow, and give one reason for each choice.

Our team meets every Monday for an hour, and most of the time nobody remembers what was decided. Propose
three small changes to the meeting that cost nothing, and say how we would notice that they work.

What is the difference between a map and a plan? Answer in a few sentences, give one example of each, and
then name a situation in which a person would need both of them on the same day.

Write the opening paragraph of a story about a lighthouse keeper who finds a letter without a sender.
Keep the sentences short, let the weather set the mood, and stop before the letter is opened.

A shop owner notices that sales fall on every rainy Tuesday but not on other rainy days. List three
possible reasons, and for each of them say which simple observation would show that it is wrong.

Give advice to someone who wants to learn to swim as an adult and is afraid of deep water. Describe the
first three lessons, and say what should be true before going on to the next one.

Explain how a thermos bottle keeps tea hot and lemonade cold with the same wall. Avoid technical words
where you can, and correct one wrong belief that many people have about it.

A village has one bridge, and it must be closed for repair for two weeks. Who should be told first, what
should they be told, and which other way to cross the river could be offered meanwhile?

Compare walking and taking the bus to a place two kilometres away. Consider time, money, health and bad
weather, and finish with a clear recommendation for a person who carries a heavy bag.

Tell me how to read a nutrition label on a box of cereal. Which three numbers matter most for a child,
what do they mean, and which trick on the front of the box should I not fall for?

Somebody found an old key in the attic and nobody knows what it opens. Describe a careful way to find out
which lock it belongs to, beginning with what the key itself can tell.

A school wants to plant twelve trees in its yard next spring. Write a short plan with the main steps from
now until then, and name the one decision that should not be put off.\
"""
CHAT = tuple(paragraph.replace("\n", " ") for paragraph in _CHAT.split("\n\n"))
"""Prompts of `quickstart-chat`."""

HEALTH = (
    "Name four things that float on water, and say why one of them does.",
    "Describe a quiet street in the early morning in three sentences.",
    "Explain what a calendar is for to someone who has never seen one.",
    "List the steps of making a cup of tea, in order.",
    "Say in simple words why the sky turns red in the evening.",
    "Give three reasons to keep a notebook, one sentence each.",
    "Describe how to fold a sheet of paper into an envelope.",
    "Compare a river and a road in three short sentences.",
)
"""Prompts of `health`."""

_LISTS: tuple[tuple[str, tuple[str, ...], tuple[tuple[str | int, ...], ...]], ...] = (
    ("rooms", ("room", "seats"), (("north", 12), ("south", 8), ("east", 20))),
    ("tools", ("tool", "count"), (("hammer", 3), ("saw", 2), ("drill", 1))),
    ("fruit", ("name", "grams"), (("apple", 150), ("pear", 170), ("plum", 60))),
    ("trips", ("to", "km"), (("harbour", 14), ("castle", 9), ("forest", 22))),
    ("boxes", ("box", "kg"), (("red", 4), ("green", 7), ("blue", 5))),
    ("lamps", ("lamp", "watt"), (("desk", 6), ("hall", 9), ("yard", 15))),
    ("birds", ("bird", "eggs"), (("robin", 5), ("swan", 6), ("owl", 4))),
    ("seeds", ("plant", "days"), (("bean", 8), ("carrot", 14), ("basil", 10))),
    ("books", ("title", "pages"), (("Rivers", 210), ("Bread", 96), ("Clouds", 148), ("Glass", 180))),
    ("staff", ("name", "desk"), (("Ana", 3), ("Ben", 7), ("Cleo", 5), ("Dan", 9))),
    ("paint", ("colour", "litres"), (("white", 10), ("grey", 4), ("ochre", 2), ("black", 1))),
    ("shops", ("shop", "opens"), (("baker", 6), ("grocer", 8), ("tailor", 10), ("florist", 9))),
    ("ports", ("port", "depth"), (("Alder", 7), ("Birch", 11), ("Cedar", 9), ("Maple", 13))),
    ("games", ("game", "players"), (("chess", 2), ("bridge", 4), ("go", 2), ("tag", 6))),
    ("cups", ("size", "ml"), (("small", 120), ("medium", 200), ("large", 330), ("jug", 1000))),
    ("doors", ("door", "width"), (("front", 95), ("back", 85), ("cellar", 70), ("attic", 60))),
)
"""Name, columns and rows of the lists in `quickstart-copy`; shorter ones first."""

_CHANGES = (
    "Write the list again and add one more item at the end.",
    "Copy the list, then write it a second time without the first item.",
    "Write the list again in the opposite order.",
    "Write the list again twice, unchanged.",
)


def copy() -> tuple[str, ...]:
    """Prompts of `quickstart-copy`."""
    prompts = []
    for i, (name, columns, values) in enumerate(_LISTS):
        rows = [dict(zip(columns, row, strict=True)) for row in values]
        text = ",\n".join(json.dumps(row) for row in rows)
        prompts.append(f'{_CHANGES[i % len(_CHANGES)]}\n{{"{name}": [\n{text}\n]}}')
    return tuple(prompts)


def packs() -> dict[str, bytes]:
    """Every shipped pack as the bytes of its JSONL file."""
    texts = {"quickstart-chat": CHAT, "quickstart-copy": copy(), "health": HEALTH}
    return {
        name: "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in prompts).encode()
        for name, prompts in texts.items()
    }


if __name__ == "__main__":
    for pack, data in packs().items():
        (Path(sys.argv[1]) / f"{pack}.jsonl").write_bytes(data)
