"""The retrieval language asks what documents say in their order, and its model is trained the same
each time.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvhold_lab.retrieval.language import (
    ANSWER_TOKENS,
    ASK,
    DEFINE,
    END,
    FACT,
    IS,
    NO_LABEL,
    QUESTION_TOKENS,
    VOCAB_SIZE,
    Exercise,
    Shape,
    draw,
)

SHAPES = [Shape.of(tokens) for tokens in (8, 16, 40, 140, 799)]


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape.document_tokens} tokens")
def exercise(request: pytest.FixtureRequest) -> Exercise:
    return draw(np.random.default_rng(0), request.param, 12)


def read(exercise: Exercise) -> Iterator[tuple[int, int, int | None]]:
    """Of each fact: its document, its entity, and its value by the last definition before it."""
    defined: dict[int, int] = {}
    for number, document in enumerate(exercise.documents.tolist()):
        for at, token in enumerate(document):
            if token == DEFINE:
                defined[document[at + 1]] = document[at + 2]
            if token == FACT:
                said = document[at + 2]
                is_symbol = exercise.resolved[number, at + 2] != NO_LABEL
                yield number, document[at + 1], defined.get(said) if is_symbol else said


def test_answers_follow_from_the_documents_in_their_order(exercise: Exercise) -> None:
    values = {entity: value for _, entity, value in read(exercise)}
    assert None not in values.values()
    for question in exercise.questions.tolist():
        assert (question[0], question[3], question[6]) == (ASK, IS, END)
        assert question[4:6] == [values[entity] for entity in question[1:3]]


def test_labels_are_the_values_of_uses(exercise: Exercise) -> None:
    values = {(number, entity): value for number, entity, value in read(exercise)}
    found = 0
    for number, at in zip(*np.nonzero(exercise.resolved != NO_LABEL), strict=True):
        entity = int(exercise.documents[number, at - 1])
        assert exercise.resolved[number, at] == values[int(number), entity]
        found += 1
    assert found


def test_a_use_is_between_two_definitions_in_other_documents(exercise: Exercise) -> None:
    for number, at in zip(*np.nonzero(exercise.resolved != NO_LABEL), strict=True):
        symbol = exercise.documents[number, at]
        places = [
            other
            for other, where in zip(*np.nonzero(exercise.documents == symbol), strict=True)
            if exercise.documents[other, where - 1] == DEFINE
        ]
        assert len(places) == 2 and places[0] < number < places[1]


def test_sizes_and_tokens_are_as_promised(exercise: Exercise) -> None:
    assert exercise.questions.shape == (12, QUESTION_TOKENS + ANSWER_TOKENS)
    assert 0 <= exercise.documents.min() and exercise.documents.max() < VOCAB_SIZE
    assert exercise.is_across.shape == (12, 2)


def test_records_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="records do not fit into 12 tokens"):
        draw(np.random.default_rng(0), Shape(12, uses=20, facts=20), 1)


def test_training_repeats_itself(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from kvhold_lab.retrieval.training import TrainingPhase, train

    phases = (TrainingPhase(2, 2, 8, 9, 2, 64),)
    said: list[str] = []
    written = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        train(tmp_path / name, phases, said.append)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    assert len(said) == 2 and said[0].startswith("step 2, ")
