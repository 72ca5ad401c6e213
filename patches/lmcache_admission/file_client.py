"""Files in a folder, in the place of LMCache's native client: the same names, the same bytes, summed on their way."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patches.lmcache_admission.batch_client import BatchClient
from patches.lmcache_admission.streaming import Streamed

__all__ = ["FileClient"]

logger = logging.getLogger(__name__)


class FileClient(BatchClient):
    """What LMCache asks of its native client of a folder.

    Args:
        folder: Of the files.
        temporary: A folder in the same file system, where files are written before they get their names.
        num_workers: Threads.
        direct: Whether to go past the page cache where address and length are whole blocks.
        ahead: Whether to ask the file system for a whole file before its first piece.
    """

    def __init__(self, folder: Path, temporary: Path, num_workers: int, *, direct: bool, ahead: bool) -> None:
        super().__init__(num_workers, "splint-file")
        self._folder, self._temporary = str(folder), str(temporary)
        self._ahead = ahead
        self._block = os.statvfs(folder).f_bsize if direct else 0

    def submit_batch_get(self, keys: Sequence[str], targets: Sequence[Any]) -> int:
        """Fill each target with its key's file; a shorter file is none."""
        return self._each(self._read, keys, targets)

    def submit_batch_set(self, keys: Sequence[str], values: Sequence[Any]) -> int:
        """Write each value into its key's file, unless there is one."""
        return self._each(self._write, keys, values, all_or_error=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask for each key whether it has a file."""
        return self._each(lambda key: os.path.exists(self._file(key)), keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Delete each key's file."""
        return self._each(self._unlink, keys)

    def _each(self, do: Callable[..., bool], *columns: Sequence[Any], all_or_error: bool = False) -> int:
        def work(part: slice, results: list[bool]) -> str:
            trouble = ""
            rows = zip(*(column[part] for column in columns), strict=True)
            for place, row in enumerate(rows, part.start):
                try:
                    results[place] = do(*row)
                except OSError as error:
                    trouble = str(error)
            if trouble:
                logger.warning("A file in %s: %s", self._folder, trouble)
            return trouble if all_or_error else ""

        return self._submit(len(columns[0]), work, all_or_error=all_or_error)

    def _file(self, key: str) -> str:
        """LMCache's own name for it: ``test_names_are_those_of_lmcache`` compares."""
        model, rank, rest = key.split("@", 2)
        return f"{self._folder}/{model.replace('/', '-SEP-')}@0x{rank}@{rest}.data"

    def _flags(self, value: Streamed) -> int:
        whole = self._block and not value.inner.data_ptr % self._block and not len(value) % self._block
        return os.O_DIRECT if whole else 0

    def _read(self, key: str, target: Streamed) -> bool:
        try:
            descriptor = os.open(self._file(key), os.O_RDONLY | self._flags(target))
        except FileNotFoundError:
            return False
        try:
            if self._ahead:
                os.posix_fadvise(descriptor, 0, len(target), os.POSIX_FADV_WILLNEED)
            return all(_filled(descriptor, piece) for piece in target.incoming())
        finally:
            os.close(descriptor)

    def _write(self, key: str, value: Streamed) -> bool:
        file = self._file(key)
        if os.path.exists(file):
            return True
        temporary = f"{self._temporary}/{uuid.uuid4().hex}.tmp"
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._flags(value), 0o644)
        try:
            try:
                for piece in value.outgoing():
                    _write_all(descriptor, piece)
            finally:
                os.close(descriptor)
            os.rename(temporary, file)
        except OSError:
            os.unlink(temporary)
            raise
        return True

    def _unlink(self, key: str) -> bool:
        try:
            os.unlink(self._file(key))
        except FileNotFoundError:
            return False
        return True


def _filled(descriptor: int, piece: memoryview) -> bool:
    """Read on into the whole of ``piece``; False where the file ends before."""
    while piece:
        count = os.readv(descriptor, [piece])
        if not count:
            return False
        piece = piece[count:]
    return True


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
