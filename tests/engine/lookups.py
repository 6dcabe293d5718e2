"""A tiny language in which a head must remember what stood far back, and a model and a head that have learnt it.

A text begins with four table tokens: one for each question, which says the question's answer. Then come the questions
in a cycle, each with its answer. A head that has not seen the table can only guess the answers.

The weights are in `lookups.safetensors`. ``python -m tests.engine.lookups`` trains them anew, in about a minute: the
model learns the next token; the head learns the one behind it from the model's states, and these do not learn for it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from start_llm.engine.decode.head import HeadedModel
from start_llm.engine.decode.upstream_heads import QwenHead
from tests.engine.headed import new_head
from tests.engine.zoo import fresh

FILE = Path(__file__).with_suffix(".safetensors")
QUESTIONS, ANSWERS = 4, 8
TABLE = 32  # its first token


def lookups(key: mx.array, rows: int, length: int) -> mx.array:
    """Texts, [rows, length]."""
    drawn, order, first = mx.random.split(key, 3)
    answers = mx.random.randint(0, ANSWERS, (rows, QUESTIONS), key=drawn)
    places = mx.argsort(mx.random.uniform(shape=(rows, QUESTIONS), key=order), axis=1)
    table = TABLE + ANSWERS * places + mx.take_along_axis(answers, places, axis=1)
    number = mx.arange(length - QUESTIONS)[None]
    asked = (mx.random.randint(0, QUESTIONS, (rows, 1), key=first) + number // 2) % QUESTIONS
    said = mx.where(number % 2 == 0, asked, ANSWERS + mx.take_along_axis(answers, asked, axis=1))
    return mx.concatenate([table, said], axis=1)


class _Both(nn.Module):
    """What model and head say of the next token behind each one, and of the one behind that."""

    def __init__(self, language: Any, head: Any) -> None:
        super().__init__()
        self.language, self.head = language, head

    def __call__(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        inner, project, fixed = self.language.model, self.language.lm_head, mx.stop_gradient
        state = inner(tokens)
        places = mx.tile(mx.arange(tokens.shape[1] - 1)[None, None], (3, 1, 1))
        embedded = fixed(inner.embed_tokens(tokens[:, 1:]))
        guess = self.head._forward_hidden(embedded, fixed(state)[:, :-1], None, places)
        return project(state), guess @ fixed(project.weight).T


def train(steps: int, wanted: float = 0.99) -> None:
    """Until both are right so often, and at most so many steps."""
    both = _Both(fresh("qwen3_5", 11).language_model, new_head(12))
    optimiser = optim.Adam(learning_rate=4e-3)

    def loss(both: Any, tokens: mx.array) -> mx.array:
        said, guessed = both(tokens)
        pairs = ((said[:, QUESTIONS:-1], QUESTIONS + 1), (guessed[:, QUESTIONS - 1 : -1], QUESTIONS + 1))
        return sum(nn.losses.cross_entropy(logits, tokens[:, at:], reduction="mean") for logits, at in pairs)

    step = nn.value_and_grad(both, loss)
    for number in range(steps):
        lost, gradients = step(both, lookups(mx.random.key(number), 16, QUESTIONS + 17))
        optimiser.update(both, optim.clip_grad_norm(gradients, 1.0)[0])
        mx.eval(both.parameters(), optimiser.state, lost)
        if number % 50 == 0:
            tokens = lookups(mx.random.key(steps), 32, QUESTIONS + 17)
            said, guessed = (mx.argmax(logits, axis=-1) for logits in both(tokens))
            right = said[:, QUESTIONS:-1] == tokens[:, QUESTIONS + 1 :]
            ahead = guessed[:, QUESTIONS - 1 : -1] == tokens[:, QUESTIONS + 1 :]
            shares = [float(mx.mean(each).item()) for each in (right, ahead)]
            print(f"step {number}: loss {lost.item():.3f}, right {shares[0]:.3f} and {shares[1]:.3f}", flush=True)
            if min(shares) >= wanted:
                break
    weights = {name: array.astype(mx.float16) for name, array in tree_flatten(both.parameters())}
    mx.save_safetensors(str(FILE), weights, {"format": "mlx"})


@cache
def learnt() -> HeadedModel:
    """The model with its head, out of the file."""
    model, head = fresh("qwen3_5", 11), new_head(12)
    both = _Both(model.language_model, head)
    both.load_weights([(name, array.astype(mx.float32)) for name, array in mx.load(str(FILE)).items()])
    both.eval()
    return HeadedModel(model, QwenHead(head, model.language_model), model.language_model.model)


if __name__ == "__main__":
    train(2000)
