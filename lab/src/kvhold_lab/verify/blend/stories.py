"""Made-up texts: five documents, and a question that needs one or two of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

NUM_DOCUMENTS = 5
_FIRST_NAMES = "Ada Boris Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Luca Mona Nils Olga"
_LAST_NAMES = "Abbott Brandt Castell Dorn Ekberg Farrow Giles Hansen Iversen Jansen Keller Lorenz"
_TOWNS = "Ashford Brookhaven Calder Dunmore Eastvale Fenwick Glenrock Harwick Inverley Kestrel"
_PLACES = "harbour library mill observatory bakery museum station brewery theatre workshop"
_DUTIES = (
    ("keeps the key of", "Who keeps the key of"),
    ("pays the rent of", "Who pays the rent of"),
    ("repairs the roof of", "Who repairs the roof of"),
    ("writes the letters of", "Who writes the letters of"),
)
_SAYINGS = (
    "It was built {year} years ago and has been painted twice since then.",
    "On market days a long queue forms in front of its door.",
    "A small garden behind it grows beans, onions and {year} rose bushes.",
    "Visitors from {town} like its quiet rooms and the view of the river.",
    "In winter the stove is lit at six in the morning.",
    "The council of {town} discussed it for {year} evenings.",
    "Its clock runs four minutes late, and everybody is used to that.",
    "A painter from {town} once gave it a picture of a grey horse.",
)


def stories(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Lines as in `questions`."""
    firsts, lasts, towns, places = (
        text.split() for text in (_FIRST_NAMES, _LAST_NAMES, _TOWNS, _PLACES)
    )
    while True:
        chosen = [places[at] for at in rng.permutation(len(places))[:NUM_DOCUMENTS]]
        town = towns[rng.integers(len(towns))]
        people = [
            f"{firsts[first]} {lasts[rng.integers(len(lasts))]}"
            for first in rng.permutation(len(firsts))[: NUM_DOCUMENTS + 1]
        ]
        (does, asks), other = (_DUTIES[at] for at in rng.permutation(len(_DUTIES))[:2])
        asked, through = (int(at) for at in rng.permutation(NUM_DOCUMENTS)[:2])
        facts = [f"{people[at]} {does} the {chosen[at]}." for at in range(NUM_DOCUMENTS)]
        answer = people[asked]
        if rng.random() < 0.5:  # the answer is in another document
            facts[asked] = (
                f"The person who {other[0]} the {chosen[through]} also {does} the {chosen[asked]}."
            )
            facts[through] += f" {people[-1]} {other[0]} the {chosen[through]}."
            answer = people[-1]
        yield {
            "before": "Read the notes, and answer with a name.\n\n",
            "documents": [
                _write(rng, f"Note on the {place} of {town}.", fact, towns)
                for place, fact in zip(chosen, facts, strict=True)
            ],
            "question": f"Question: {asks} the {chosen[asked]} of {town}?\nAnswer:",
            "answers": [answer],
        }


def _write(rng: np.random.Generator, title: str, fact: str, towns: list[str]) -> str:
    said = [
        _SAYINGS[at].format(year=rng.integers(3, 90), town=towns[rng.integers(len(towns))])
        for at in rng.permutation(len(_SAYINGS))[:5]
    ]
    said.insert(int(rng.integers(len(said) + 1)), fact)
    return " ".join([title, *said]) + "\n\n"
