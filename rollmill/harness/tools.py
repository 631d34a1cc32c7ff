"""The default tools, over one sandbox: what happens in the box is an answer to the model, and only a broken box raises.

Programs of the box's own do the searching and listing (python3, else grep and find), so a box needs nothing installed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from rollmill.harness.toolset import NO_OUTPUT, CallError, FunctionTools
from rollmill.sandbox.interface import ExecResult, Sandbox

TOOLS = ("bash", "read", "write", "edit", "search", "list", "submit")
READ_ONLY = frozenset({"read", "search", "list"})
ENDS = frozenset({"submit"})
MAX_READ_BYTES = 16 << 20
"""What `read` takes in to cut lines out of it."""

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class BoxTools(FunctionTools):
    """The tools of one episode's box."""

    def __init__(
        self, box: Sandbox, names: Sequence[str] = TOOLS, *, strict: bool = True, tool_s: float = 60.0, max_chars: int = 2000
    ) -> None:
        """`names`: those the agent may call. `tool_s`: how long one call may take. A longer result than `max_chars` loses its middle."""
        if unknown := [n for n in names if n not in TOOLS]:
            raise ValueError(f"there is no tool {unknown[0]!r}; known: {', '.join(TOOLS)}")
        functions = {name: getattr(self, f"_{name}") for name in names}
        super().__init__(functions, ends=ENDS & set(names), read_only=READ_ONLY & set(names), strict=strict)
        self.box, self._strict, self._tool_s, self._max_chars = box, strict, tool_s, max_chars

    def on(self, box: Sandbox) -> BoxTools:
        """The same tools over another box, such as a fork."""
        return BoxTools(box, tuple(self._functions), strict=self._strict, tool_s=self._tool_s, max_chars=self._max_chars)

    async def pass_time(self, seconds: float) -> None:
        """A real process in the box really takes this long, as a slow build or test suite would."""
        await self.box.exec(["sleep", f"{seconds:.3f}"], timeout_s=seconds + self._tool_s)

    def checked(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        found = super().checked(name, arguments)
        for argument in ("command", "pattern", "glob") + (("path",) if name in ("search", "list") else ()):
            if "\0" in str(found.get(argument, "")):
                raise CallError(f"error: {argument!r} of {name} holds a character that is not text")
        return found

    async def _do(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            text: str = await self._functions[name](**arguments)
        except (OSError, ValueError) as error:
            # What the agent's path did inside the box; failures of the box itself are RunFailure and pass through.
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            return f"error: {arguments.get('path', '')[:200]}: {reason}"
        return text

    def _wrong_type(self, wanted: str, got: str) -> str:
        return wanted

    async def _bash(self, command: str, timeout_s: Seconds | None = None) -> str:
        """Run a shell command in the working directory.

        Args:
            command: shell command to run in the working directory
            timeout_s: seconds until it is stopped; never more than the run allows
        """
        limit_s = min(timeout_s or self._tool_s, self._tool_s)
        return await self._exec(["bash", "-c", command], limit_s)

    async def _read(self, path: str, first_line: Count | None = None, num_lines: Count | None = None) -> str:
        """Read a text file, or some lines of it.

        Args:
            path: file to read
            first_line: number of the first line, from 1
            num_lines: how many lines
        """
        if first_line is None and num_lines is None:
            return self._short((await self.box.read(path)).decode("utf-8", "replace"))
        lines = (await self.box.read(path, limit_bytes=MAX_READ_BYTES)).decode("utf-8", "replace").splitlines(keepends=True)
        start = (first_line or 1) - 1
        if start >= len(lines):
            return f"error: {path[:200]} has {len(lines)} lines"
        return self._short("".join(lines[start : None if num_lines is None else start + num_lines]))

    async def _write(self, path: str, content: str) -> str:
        """Create or replace a file.

        Args:
            path: file to create or replace
            content: its whole new text
        """
        await self.box.write(path, content.encode("utf-8", "replace"))
        return "ok"

    async def _edit(self, path: str, old: str, new: str, all: bool = False) -> str:
        """Replace text in a file.

        Args:
            path: file to change
            old: text that occurs exactly once
            new: text to put there
            all: replace every occurrence of `old`
        """
        text = (await self.box.read(path)).decode("utf-8", "surrogateescape")
        found = text.count(old) if old else 0
        if found == 0 or (found > 1 and not all):
            return f"error: old text {'not found' if not found else f'found {found} times'} in {path}"
        await self.box.write(path, text.replace(old, new).encode("utf-8", "surrogateescape"))
        return "ok" if found == 1 else f"ok, {found} places"

    async def _search(self, pattern: str, path: str = ".", glob: str = "", max_hits: Count = 50) -> str:
        """Search files for a regular expression. Hits are `path:line number:line`.

        Args:
            pattern: regular expression, matched line by line
            path: file or folder to search
            glob: only files whose name matches, e.g. `*.py`
            max_hits: how many hits to show
        """
        argv = ["sh", "-c", _SEARCH_SH, "search", _SEARCH_PY, pattern, path, glob, str(max_hits)]
        return await self._exec(argv, self._tool_s)

    async def _list(self, path: str = ".", depth: Count = 1) -> str:
        """List a folder: folders end with `/`, links show where they lead.

        Args:
            path: folder to list
            depth: how many levels deep
        """
        return await self._exec(["sh", "-c", _LIST_SH, "list", _LIST_PY, path, str(depth)], self._tool_s)

    async def _submit(self) -> str:
        """End the task: the files are handed in as they are now."""
        return ""

    async def _exec(self, argv: list[str], limit_s: float) -> str:
        result = await self.box.exec(argv, timeout_s=limit_s, max_output_bytes=4 * self._max_chars)
        return self._short(_say(result, limit_s))

    def _short(self, text: str) -> str:
        return shorten(text, self._max_chars)


def _say(result: ExecResult, timeout_s: float) -> str:
    text = result.stdout.decode("utf-8", "replace")
    if result.timed_out:
        return f"{text}[stopped after {timeout_s:g} s]"
    if result.exit_code != 0:
        return f"{text}[exit {result.exit_code}]"
    return text or NO_OUTPUT


def shorten(text: str, max_chars: int) -> str:
    """Keep head and tail of a long text and say how much is missing."""
    if len(text) <= max_chars:
        return text
    keep = max_chars // 2
    return f"{text[:keep]}\n[{len(text) - 2 * keep} characters left out]\n{text[-keep:]}"


# Binary files (a NUL near the start), files past 8 MiB, links and special files are passed over; long lines are cut.
_SEARCH_PY = r"""
import fnmatch, os, re, stat, sys
pattern, top, glob, most = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
try:
    wanted = re.compile(pattern)
except (re.error, RecursionError, OverflowError) as error:
    print("error: pattern: %s" % error); sys.exit()
if not os.path.exists(top):
    print("error: %s: No such file or directory" % top); sys.exit()
def files():
    if not os.path.isdir(top):
        yield top
        return
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(f for f in folders if f != ".git")
        for name in sorted(names):
            yield os.path.normpath(os.path.join(folder, name))
sys.stdout.reconfigure(errors="replace")
hits = 0
for path in files():
    if glob and not fnmatch.fnmatch(os.path.basename(path), glob) and not fnmatch.fnmatch(path, glob):
        continue
    try:
        about = os.lstat(path)
        if not stat.S_ISREG(about.st_mode) or about.st_size > 8 << 20:
            continue
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        continue
    if b"\0" in data[:8192]:
        continue
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        line = line.rstrip("\r")
        if wanted.search(line):
            hits += 1
            if hits > most:
                print("[only the first %d hits; narrow the pattern, the path or the glob]" % most); sys.exit()
            print("%s:%d:%s" % (path, number, line[:300]))
if not hits:
    print("(no hits)")
"""

_SEARCH_SH = """command -v python3 > /dev/null && exec python3 -I -S -W ignore -c "$@"
if [ -n "$4" ]; then set -- "$@" --include="$4"; fi
grep -rnIE ${6:+"$6"} -e "$2" -- "$3" | head -n "$5"
"""

_LIST_PY = r"""
import os, sys
top, depth, most = sys.argv[1], min(int(sys.argv[2]), 50), 500
num = 0
def show(folder, prefix, left):
    global num
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        num += 1
        if num > most:
            print("[only the first %d entries]" % most); sys.exit()
        name, is_folder = prefix + entry.name, entry.is_dir(follow_symlinks=False)
        print(name + (" -> " + os.readlink(entry.path) if entry.is_symlink() else "/" if is_folder else ""))
        if is_folder and left > 1:
            try:
                show(entry.path, name + "/", left - 1)
            except OSError:
                continue
sys.stdout.reconfigure(errors="replace")
try:
    show(top, "", depth)
    if not num:
        print("(empty)")
except OSError as error:
    print("error: %s: %s" % (top, error.strerror))
"""

_LIST_SH = """command -v python3 > /dev/null && exec python3 -I -S -W ignore -c "$@"
find "$2" -mindepth 1 -maxdepth "$3" | sort | head -n 500
"""
