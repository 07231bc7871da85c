"""Line numbers of the keys of a TOML text that has been read: tomllib gives values only, and an error has to say where."""

import re
import tomllib
from bisect import bisect_right
from contextlib import suppress

Path = tuple[str | int, ...]
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""+|\'\'\'.*?\'\'\'+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\n]+")


class Lines:
    """Where each key of a text stands, by its path such as `("prices", 0, "from")`. The text is TOML that tomllib has taken."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._at = 0
        self._found: dict[Path, int] = {}
        self._tables: dict[Path, int] = {}
        # Where the text goes on as no TOML does, the rest has no line; what is said of it names the key all the same.
        with suppress(ValueError, RecursionError):
            self._document()

    def of(self, path: Path) -> int | None:
        """The line of a key, or of the nearest table or value around it that was found; None for the whole text."""
        for length in range(len(path), 0, -1):
            if (line := self._found.get(path[:length])) is not None:
                return line
        return None

    def _note(self, path: Path, at: int) -> None:
        self._found.setdefault(path, bisect_right(self._ends, at - 1) + 1)

    def _skip(self) -> int:
        self._take(_BLANK)
        return self._at

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(self._at)
        self._at = match.end()
        return match[0]

    def _next(self, mark: str) -> bool:
        """Whether `mark` comes next, after blanks; it is then passed."""
        if not self._text.startswith(mark, self._skip()):
            return False
        self._at += len(mark)
        return True

    def _document(self) -> None:
        table: Path = ()
        while self._skip() < len(self._text):
            at = self._at
            if self._next("[["):
                table = self._inside(self._keys())
                self._tables[table] = self._tables.get(table, -1) + 1
                table += (self._tables[table],)
                self._note(table, at)
                self._next("]]")
            elif self._next("["):
                table = self._inside(self._keys())
                self._note(table, at)
                self._next("]")
            else:
                self._pair(table)

    def _inside(self, keys: Path) -> Path:
        """The path of a header: a table inside an array of tables is one of its newest element."""
        path: Path = ()
        for key in keys[:-1]:
            path += (key,)
            if path in self._tables:
                path += (self._tables[path],)
        return path + keys[-1:]

    def _keys(self) -> Path:
        keys: Path = ()
        while True:
            self._skip()
            if self._text[self._at : self._at + 1] in ('"', "'"):
                keys += (str(tomllib.loads(f"key = {self._take(_STRING)}")["key"]),)
            else:
                keys += (self._take(_BARE_KEY),)
            if not self._next("."):
                return keys

    def _pair(self, table: Path) -> None:
        at = self._skip()
        path = table + self._keys()
        for length in range(len(table) + 1, len(path) + 1):
            self._note(path[:length], at)
        if not self._next("="):
            raise ValueError(self._at)
        self._value(path)

    def _value(self, path: Path) -> None:
        self._note(path, self._skip())
        if self._next("["):
            index = 0
            while not self._next("]"):
                self._value((*path, index))
                index += 1
                self._next(",")
        elif self._next("{"):
            while not self._next("}"):
                self._pair(path)
                self._next(",")
        elif self._text[self._at : self._at + 1] in ('"', "'"):
            self._take(_STRING)
        else:
            self._take(_SCALAR)
