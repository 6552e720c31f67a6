"""C++ headers, preprocessed and cut into declarations, with the names that each may be called by.

No compiler's work: brackets are counted, and names are taken where they stand as a rule, too many rather than too few.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Declaration:
    """A piece of a header at the level of namespaces.

    around: the namespaces as they are opened. names: what it declares; none: it always stays. text: without line
    markers. kind: "class", "call" (a function or an operator) or "". needs: the words of a function's parameters, or of
    what a template is specialized for.
    """

    around: tuple[str, ...]
    names: tuple[str, ...]
    text: str
    kind: str = ""
    needs: tuple[str, ...] = ()
    file: str = ""

    @property
    def path(self) -> tuple[str, ...]:
        """The namespaces' names, but for those whose members are their parents'."""
        found: list[str] = []
        for opened in self.around:
            if not opened.startswith(("inline", "extern")):
                named = _NAMESPACE_NAME.search(opened)
                found += named[1].split("::") if named is not None else ["<anonymous>"]
        return tuple(found)

    @property
    def kept(self) -> tuple[object, ...]:
        """Its fields, as they are kept."""
        return self.around, self.names, self.text, self.kind, self.needs, self.file


def cut(text: str) -> Iterator[Declaration]:
    """The declarations of preprocessed text."""
    around: list[str] = []
    file = ""
    at, start, depth = 0, 0, 0
    closes_itself = False
    while (found := (_INSIDE if depth else _EVENT).search(text, at)) is not None:
        what, at = found[0], found.end()
        if what == "{":
            if depth == 0:
                head = text[start : found.start()]
                bare = _LINES.sub("", head).strip()
                if _NAMESPACE.fullmatch(bare) is not None:
                    around.append(bare)
                    start = at
                    continue
                closes_itself = is_function(head)
            depth += 1
        elif what == "}":
            if depth == 0:
                around.pop()
                start = at
                continue
            depth -= 1
            if depth == 0 and closes_itself and not _GOES_ON.match(text, at):
                yield _declaration(around, text[start:at], file)
                start = at
        elif what == ";":
            if depth == 0:
                if text[start : found.start()].strip():
                    yield _declaration(around, text[start:at], file)
                start = at
        elif (marker := _MARKER.match(what)) is not None:
            file = marker[1]
            if not depth and not text[start : found.start()].strip():
                start = at
        elif what[0] not in "\"'" and not depth and not text[start : found.start()].strip():
            if "visibility" in what:
                yield Declaration(tuple(around), (), what.strip())
            if "pragma" not in what or _OF_MANY.search(what):
                start = at


_MARKER = re.compile(r'\s*#[ \t]*(?:line[ \t]+)?\d+[ \t]+"([^"]*)"')
_OF_MANY = re.compile(r"pragma\s+(?:GCC|nv_diag\w*|once|clang|message)\b")  # no pragma of the next declaration alone
_GOES_ON = re.compile(r"\s*[,{]")  # members that are initialized in braces
_EVENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'(?<!\d\')|[{};]|(?:^|\n)[ \t]*\#[^\n]*', re.MULTILINE)
_INSIDE = re.compile(_EVENT.pattern.replace("[{};]", "[{}]"), re.MULTILINE)  # of a block: where it ends
_LINES = re.compile(r"^[ \t]*#[^\n]*\n?", re.MULTILINE)
_MARKERS = re.compile(r"^[ \t]*#(?![ \t]*pragma)[^\n]*\n?", re.MULTILINE)
_NAMESPACE_NAME = re.compile(r"namespace\s+(?:__attribute__\s*\(\(.*?\)\)\s*)?([\w:]+)")
_NAMESPACE = re.compile(
    r'(?:inline\s+)?namespace(?:\s+__attribute__\s*\(\(.*?\)\))?(?:\s+[\w:]+)?(?:\s+__attribute__\s*\(\(.*?\)\))?|extern\s*"C(?:\+\+)?"',
    re.DOTALL,
)
_ATTRIBUTE = re.compile(
    r"\b(?:__attribute__|__typeof__|__typeof|alignas|__declspec|__launch_bounds__|decltype|noexcept|__asm__|explicit)\s*\("
)
_CLASS = re.compile(
    r"^(?:typedef\s+|constexpr\s+|static\s+|extern\s+|inline\s+|__extension__\s+)*(?:struct|class|union|enum)\b"
)


_BRACKET = re.compile(r"[()]")


def without_attributes(head: str) -> str:
    """A declaration's head without what is in brackets behind words that are no names."""
    while True:
        found = _ATTRIBUTE.search(head)
        if found is None:
            return head
        depth, at = 1, len(head)
        for bracket in _BRACKET.finditer(head, found.end()):
            depth += 1 if bracket[0] == "(" else -1
            if not depth:
                at = bracket.end()
                break
        head = head[: found.start()] + " " + head[at:]


def without_template(head: str) -> str:
    """A declaration's head behind `template <...>` and `requires`."""
    head = head.strip()
    while head.startswith("template"):
        at = head.find("<")
        if at < 0 or head[len("template") : at].strip():
            return head[len("template") :].strip()
        depth, brackets = 0, 0
        for at in range(head.find("<"), len(head)):
            letter = head[at]
            if letter in "([{":
                brackets += 1
            elif letter in ")]}":
                brackets -= 1
            elif not brackets and letter == "<":
                depth += 1
            elif not brackets and letter == ">" and head[at - 1] != "-" and head[at + 1 : at + 2] != "=":
                depth -= 1
                if not depth:
                    break
        head = head[at + 1 :].strip()
    return head


@functools.lru_cache(maxsize=4)
def plain(text: str) -> str:
    """A declaration's head: no lines of the preprocessor, no attributes, no template parameters."""
    head = without_template(without_attributes(_LINES.sub("", text)))
    behind = _REQUIRED.match(head)
    return head if behind is None else head[behind.end() - len(behind[1]) :]


_REQUIRED = re.compile(
    r"requires\b(?:[^{};]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*?\b((?:struct|class|union|using)\s+\w+)"
)


def is_class(head: str) -> bool:
    """Does this head, plain, declare a class or an enumeration?"""
    named = _CLASS.match(head)
    found = None if named is None else re.search(r"(?<!:)[<:{;](?!:)|\(", head[named.end() :] + ";")
    return found is not None and found[0] != "("


def outside_brackets(head: str) -> str:
    """A head without arguments."""
    while (shorter := _IN_BRACKETS.sub(" ", head)) != head:
        head = shorter
    return head


def is_function(head: str) -> bool:
    """Does a block behind this head end the declaration?"""
    head = _OPERATOR.sub("operator_", plain(head))
    if is_class(head):
        return False
    if head.startswith("concept") or _ENDS_IN_REQUIRES.search(head) or _INITIALIZED.search(outside_brackets(head)):
        return False
    return "(" in head


_OPERATOR = re.compile(r"\boperator\s*(?:\(\s*\)|[^\s\w(]+)")
_ENDS_IN_REQUIRES = re.compile(r"\brequires\s*(?:\([^()]*\))?\s*$")
_IN_BRACKETS = re.compile(r"\([^()]*\)|<[^<>()=]*>")
_INITIALIZED = re.compile(r"(?<![=!<>+\-*/%&|^])=(?!=)(?!\s*(?:default|delete)\b)")


def _declaration(around: Sequence[str], text: str, file: str) -> Declaration:
    text = _MARKERS.sub("", text)
    names = names_of(text) - _KEYWORDS
    if not names and "using namespace" not in text:
        names = set(WORD.findall(_LINES.sub("", text))) - _KEYWORDS
    kind, needs = _needs(plain(text).split("{", 1)[0], names)
    return Declaration(tuple(around), tuple(sorted(names)), text, kind, tuple(sorted(needs - _KEYWORDS)), file)


def _needs(head: str, names: set[str]) -> tuple[str, set[str]]:
    """A declaration's kind, and what words say for which arguments it is."""
    if head.startswith(("using", "typedef", "concept", "static_assert")):
        return "", set()
    special = _special(head, names) if names and "operator" not in names else None
    if is_class(head):
        arguments = "" if special is None else re.split(r">\s*(?::(?!:)|final|$)", special)[0]
        return "class", set(WORD.findall(arguments))
    if special is not None and "(" not in head.split("=")[0]:
        return "", set(WORD.findall(special.split("=")[0]))
    if "(" in head.split("=" if _INITIALIZED.search(outside_brackets(_OPERATOR.sub("", head))) else "\0")[0]:
        return "call", set(WORD.findall(head if "operator" in names else head.split("(", 1)[1]))
    return "", set()


def _special(head: str, names: set[str]) -> str | None:
    """What stands behind `name<`, for which a template is specialized."""
    ends = _ENDS.search(head)
    for named in _TEMPLATE_NAME.finditer(head, 0):
        if ends is not None and named.start() > ends.start():
            return None
        if named[1] in names:
            return head[named.end() :]
    return None


_ENDS = re.compile(r"[(=;]")
_TEMPLATE_NAME = re.compile(r"\b([A-Za-z_]\w*)\s*<")


def called(head: str) -> set[str]:
    """What a function may be called by: its name, or the class that it belongs to."""
    before = head.split("(", 1)[0]
    while (shorter := re.sub(r"<[^<>]*>", "", before)) != before:
        before = shorter
    found = re.search(r"((?:\w+\s*::\s*)*)~?(\w+)\s*$", before)
    if found is None or found[2] in _KEYWORDS:
        return set(re.findall(r"([A-Za-z_]\w*)\s*\(", head))
    first = WORD.search(found[1])
    return {found[2]} if first is None or first[0] in _NAMESPACES else {first[0]}


_NAMESPACES = frozenset(["std", "cuda", "cute", "cutlass", "tl", "__gnu_cxx"])


def names_of(text: str) -> set[str]:
    """What a declaration may be called by; too many rather than too few. Empty where it must stay."""
    whole = plain(text)
    head = whole.split("{", 1)[0]
    if head.startswith(("static_assert", "_Static_assert")):
        return {"static_assert"}
    if head.startswith("using namespace") or not head:
        return set()
    if head.startswith("using"):
        return {WORD.findall(head.split("=")[0])[-1]}
    if head.startswith("concept"):
        return {WORD.findall(head)[1]}
    if head.startswith("requires"):
        return set(re.findall(r"([A-Za-z_]\w*)\s*\(", head))
    if "operator" in head:
        of_class = re.search(r"(\w+)\s*(?:<[^<>]*>)?\s*::\s*operator\b", head)
        return {"operator"} if of_class is None else {of_class[1]}
    if is_class(head):
        words = [w for w in WORD.findall(head.split("<")[0].split(" : ")[0]) if w not in _KEYWORDS]
        names = set(words[-1:]) | set(words[:1])
        if re.match(r"(?:typedef\s+)?enum\b", head):
            names |= set(WORD.findall(whole.split("{", 1)[-1].rsplit("}", 1)[0]))
        ends = re.sub(r"=\s*\{[^{}]*\}\s*;\s*$", ";", whole)  # a value behind the class
        behind = WORD.findall(ends.rsplit("}", 1)[1]) if "}" in ends else []
        return names | set(behind) | ({"operator"} if not words and not behind else set())
    if head.startswith("typedef"):
        pointed = re.findall(r"\(\s*[\w:]*\s*\*\s*(\w+)\s*\)", head)
        bare = re.sub(r"\([^()]*\)|\[[^\]]*\]", " ", head)
        return {*pointed, *WORD.findall(bare)[-1:]}
    value = _INITIALIZED.search(head)
    if value is not None and "(" not in head[: value.start()]:
        head = head[: value.start()]
    if "(" in head:
        return called(head)
    return set(WORD.findall(re.split(r"[=\[;]", re.sub(r"<[^;=]*>", " ", head))[0])[-1:])


_KEYWORDS = frozenset(
    """struct class union enum typedef final constexpr consteval constinit static extern inline const volatile
    mutable void bool char short int long float double signed unsigned auto typename template using
    namespace friend public private protected virtual explicit default delete this new true false nullptr
    return if else for while do switch case break continue goto sizeof alignof alignas decltype noexcept
    static_cast reinterpret_cast const_cast dynamic_cast register asm try catch throw typeid requires
    concept co_await co_return __extension__ __device__ __host__ __attribute__ __inline__ __asm__
    __restrict__ always_inline device host unused""".split()  # noqa: SIM905
)
