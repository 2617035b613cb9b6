"""ShuffledDocuments: the training file with its documents in another order every epoch, as a function of (seed, epoch)."""

from __future__ import annotations

import numpy as np

from gptfit.data.document_index import kept_bounds
from gptfit.data.token_files import TokenFile
from gptfit.dataset import Split
from gptfit.errors import DataError
from gptfit.train.order import Ints, mix, permute

KEPT_EPOCHS = 2  # a batch may end one epoch and begin the next


class ShuffledDocuments(TokenFile):
    """Position e * n_tokens + i is token i of epoch e. The first epoch, which evaluation reads too, is the file as it is.

    Windows that cross from one document into the next meet another one every time. Beside the index of the documents an
    epoch takes 16 bytes for each of them.
    """

    def __init__(self, split: Split, dtype: str, vocab_size: int, end_of_text: int, seed: int) -> None:
        super().__init__(split, dtype, vocab_size)
        self._seed = seed
        self._bounds: Ints = np.zeros(1, dtype=np.int64)
        self._orders: dict[int, tuple[Ints, Ints]] = {}
        if not self.n_tokens:
            return  # whoever opens it says so
        self._bounds = kept_bounds([*split.files, *split.masks], end_of_text, lambda: self._find_bounds(end_of_text))
        if len(self._bounds) < 3 and split.documents != 1:  # a single one stays in order
            raise DataError(
                f"{split.files[0]}: has no end of text (token {end_of_text}) between documents",
                fix="use shuffle_documents = False, or prepare it again",
            )

    def _find_bounds(self, end_of_text: int) -> Ints:
        ends = [part.places_of(end_of_text) for part in self._parts]
        before = [0, *self._ends[:-1].tolist()]
        inside = [place + start + 1 for place, start in zip(ends, before, strict=True)]
        return np.unique(np.concatenate([[0], *inside, [self.n_tokens]]).astype(np.int64))

    @property
    def n_documents(self) -> int:
        return len(self._bounds) - 1

    def _copy(self, start: int, row: Ints) -> None:
        epoch, place = divmod(start, self.n_tokens)
        if epoch == 0:
            super()._copy(start, row)
            return
        first_tokens, ends = self._order(epoch)
        done, document = 0, int(np.searchsorted(ends, place, side="right"))
        while done < len(row):
            piece = min(int(ends[document]) - place, len(row) - done)
            super()._copy(self._in_file(place, document, first_tokens, ends), row[done : done + piece])
            done, place, document = done + piece, place + piece, document + 1

    def place_in_file(self, position: int) -> int:
        epoch, place = divmod(position, self.n_tokens)
        if epoch == 0:
            return place
        first_tokens, ends = self._order(epoch)
        return self._in_file(place, int(np.searchsorted(ends, place, side="right")), first_tokens, ends)

    @staticmethod
    def _in_file(place: int, document: int, first_tokens: Ints, ends: Ints) -> int:
        return int(first_tokens[document]) + place - int(ends[document - 1] if document else 0)

    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        """Where each document of the epoch's order begins in the file, and where it ends in the epoch."""
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_EPOCHS:
                del self._orders[min(self._orders)]
            order = permute(np.arange(self.n_documents, dtype=np.int64), self.n_documents, mix(self._seed, -epoch))
            first_tokens = self._bounds[order]
            self._orders[epoch] = first_tokens, np.cumsum(self._bounds[order + 1] - first_tokens)
        return self._orders[epoch]
