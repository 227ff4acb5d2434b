"""A module that saves its hyper-parameters, as Lightning users' modules do, and tells which ones it runs with."""

from __future__ import annotations

from callbacks import run_dir
from tests.callbacks.tiny import TinyModule


class RememberingModule(TinyModule):
    def __init__(self, note: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_fit_start(self) -> None:
        directory = run_dir(self.trainer)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "note.txt").write_text(self.hparams["note"])
