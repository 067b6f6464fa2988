"""Progress bars of what takes a while."""

import sys

from tqdm import tqdm


class Bars:
    """Progress bars on stderr, one for each thing that is done; none where stderr is not a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many images of `total` are done; with the last one the bar stays as it is."""
        if self._bar is None or what != self._what:
            self._what, self._bar = what, tqdm(total=total, desc=what, unit="image", file=sys.stderr, disable=None)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None
