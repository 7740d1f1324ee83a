"""Own text, an LSTM, next-character loss and perplexity: one client per module of Python."""

import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx

files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))[:20]
texts = [file.read_text()[:6400] for file in files]
symbols = sorted(set("".join(texts)))
rows = [np.array([symbols.index(c) for c in t[: len(t) // 41 * 41]]).reshape(-1, 41) for t in texts]
ids = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
last = np.concatenate([np.arange(len(r)) >= 0.8 * len(r) for r in rows])  # a fifth for the test
tokens = np.concatenate(rows)


class CharLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(len(symbols), 8), nn.LSTM(8, 64, batch_first=True)
        self.head = nn.Linear(64, len(symbols))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(text))[0]).transpose(1, 2)  # [batch, symbols, 40]


def perplexity(scores: Tensor, following: Tensor) -> float:
    return math.exp(F.cross_entropy(scores, following))


def fields(some: np.ndarray) -> dict[str, Tensor]:
    return {"text": torch.tensor(tokens[some, :-1]), "following": torch.tensor(tokens[some, 1:])}


task = fx.supervised(
    "my-text", CharLSTM, fx.Federation.from_ids(fields(~last), ids[~last]), fields(last),
    loss=F.cross_entropy, metrics={"perplexity": perplexity}, inputs=("text",), label="following",
    goal="min:test_perplexity", cohort=5, rounds=20,
    local=fx.LocalTraining(lr=1.0, epochs=1, batch_size=8, clip_norm=5.0),
)  # fmt: skip

if __name__ == "__main__":
    study = fx.compare(task, ["fedavg", "fedexp"], seeds=1)
    print(study.table(), study.report("text.html"), sep="\n")
