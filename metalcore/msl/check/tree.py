"""Rules that Clang does not know, checked on its syntax tree (the text of -ast-dump, one node per line)."""

import os
import re
from collections.abc import Collection

from ..language.numbers import MAX_THREADGROUP_MEMORY
from .clang import INCLUDE, Finding, in_msl

_NODE = re.compile(r"^([| `]*-)?(\w+) (0x[0-9a-f]+) ")
_PLACE = re.compile(r"([^\s<>,:][^<>,:]*|<[^<>]+>):(\d+):(\d+)|\bcol:(\d+)")
_UNNAMED = re.compile(r"\((unnamed|anonymous)\b[^()]*\)")  # the name of a class without one has a place too
_TYPE = re.compile(r"'([^']*)'(?::'([^']*)')?")
_MENTION = re.compile(r" (?:Function|CXXMethod) (0x[0-9a-f]+) |(?:->|\.)\S+ (0x[0-9a-f]+)$")
_CONSTANT = re.compile(r"\b__global\b(?!_)")
# An object that Clang puts in __global, and that is not const: it was declared without `constant`.
_SHARED = re.compile(r"^__global\b(?!_)[^*&]*$|[*&]__global(\[\d*\])*$")
_CASTS = ("CStyleCastExpr", "CXXFunctionalCastExpr", "CXXStaticCastExpr", "CXXReinterpretCastExpr", "CXXConstCastExpr")
_FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl", "CXXDestructorDecl")
_OBJECTS = ("VarDecl", "ParmVarDecl", "FieldDecl")
_BASE = re.compile(r"(public|private|protected) .*\bmetal::(vec|packed_vec|matrix|atomic)<")
_FUNCTION_POINTER = re.compile(r"\((?:__\w+ )*[&*](?:__\w+)?\)\(")


class _Node:
    def __init__(self, kind, id, line, file, row, column):
        self.kind, self.id, self.line = kind, id, line
        self.place = (file, row, column)
        self.children = 0

    @property
    def type(self):
        match = _TYPE.search(self.line)
        return (match[2] or match[1]) if match else ""

    @property
    def name(self):
        before = self.line.split(" '", 1)[0].split()
        return before[-1] if before else ""

    @property
    def is_implicit(self):
        return " implicit " in self.line.split("'", 1)[0]


class _Tree:
    """One pass over the dump. finish() decides what needs all of it."""

    def __init__(self, lenient):
        self.lenient = lenient
        self.findings = set()
        self.functions = {}  # id -> node, of the program's own functions
        self.first = {}  # id of a redeclaration -> id of the first declaration
        self.calls = {}  # id -> ids it mentions
        self.bytes = {}  # id of a threadgroup_variable<T> -> its size
        self.variables = {}  # id of a function -> ids of the threadgroup_variable<T> it has
        self.conversions = []  # (id of a method, place) of calls on objects in constant

    def read(self, lines):
        stack, file, row = [], "", 0
        for line in lines:
            match = _NODE.match(line)
            if match is None:
                self._size(line, stack)
                continue
            depth = len(match[1] or "") // 2
            header, column, places = _UNNAMED.sub("", line[match.end() :].split(" '", 1)[0]), 0, []
            for place in _PLACE.finditer(header):
                if place[4]:
                    column = int(place[4])
                else:
                    row, column = int(place[2]), int(place[3])
                    if place[1] != "line":
                        file = place[1]
                places.append((file, row, column))
            where = (places[-1] if match[2].endswith("Decl") else places[0]) if places else (file, row, column)
            node = _Node(match[2], match[3], line, *where)
            del stack[depth:]
            stack.extend([None] * (depth - len(stack)))
            if stack and stack[-1] is not None:
                stack[-1].children += 1
            stack.append(node)
            self._visit(node, stack)

    def _size(self, line, stack):
        if base := _BASE.search(line):
            node = next(above for above in reversed(stack) if above is not None)
            if not node.place[0].startswith(os.fspath(INCLUDE)):
                self._find(node.place, "language", f"'{base[2]}' of the standard library cannot be a base class")
        if "TemplateArgument integral" in line:
            depth = (len(line) - len(line.lstrip("| `"))) // 2
            owner = stack[depth] if depth < len(stack) else None
            if owner is not None and owner.kind == "FunctionDecl" and owner.name == "threadgroup_variable":
                size = re.search(r"integral '?(\d+)", line)
                assert size is not None, line
                self.bytes[owner.id] = int(size[1])

    def _visit(self, node, stack):
        ours = node.place[0].startswith((os.fspath(INCLUDE), "<"))
        if node.kind in _FUNCTIONS:
            if previous := re.search(r" prev (0x[0-9a-f]+) ", node.line):
                self.first[node.id] = self.first.get(previous[1], previous[1])
                if self.first[node.id] in self.functions:
                    self.functions[self.first[node.id]] = node  # findings name the definition
            if not ours and not node.is_implicit:
                self.functions[node.id] = node
                self._address_space(node, node.type.split("(", 1)[0])
        elif ours:
            return
        elif node.kind in ("TypedefDecl", "TypeAliasDecl"):
            self._address_space(node, node.type)
        elif node.kind in _OBJECTS:
            local = any(above is not None and above.kind in _FUNCTIONS for above in stack)
            if node.kind == "VarDecl" and not local and _SHARED.search(node.type):
                self._find(node.place, "constant-space", f"'{node.name}' is at program scope and must be in constant")
            implicit = any(above is not None and above.kind in _FUNCTIONS and above.is_implicit for above in stack)
            if not implicit and not node.is_implicit and not node.name.startswith("__"):
                if _FUNCTION_POINTER.search(node.type):
                    self._find(node.place, "function-pointer", f"'{node.name}' is a pointer to a function")
                else:
                    self._address_space(node, node.type)
        else:
            if node.kind in ("DeclRefExpr", "MemberExpr"):
                self._mention(node, stack)
            elif node.kind == "CXXTemporaryObjectExpr" and "msl::partial" in node.line and "' list" not in node.line:
                type_ = _TYPE.search(node.line)
                assert type_ is not None, node.line
                self._find(node.place, "language", f"too few components for {in_msl(type_[1])}")
            self._conversion(node, stack)

    def _find(self, place: tuple[str, int, int], rule, message):
        self.findings.add(Finding(*place, rule, message))

    def _address_space(self, node, type_):
        # A reference to a pointer may be in no address space: const device float*& x.
        if re.search(r"__generic (?![*&])[^&*]*[&*]", type_) and node.place[:2] not in self.lenient:
            kind = "reference" if "&" in type_ else "pointer"
            what = "returns a" if node.kind in _FUNCTIONS else "is a"
            self._find(node.place, "address-space", f"'{node.name}' {what} {kind} without an address space")

    def _mention(self, node, stack):
        match = _MENTION.search(node.line)
        function = next((above for above in reversed(stack) if above is not None and above.kind in _FUNCTIONS), None)
        if match is None or function is None:
            return
        target = match[1] or match[2]
        self.calls.setdefault(function.id, set()).add(target)
        if " 'threadgroup_variable' " in node.line:
            self.variables.setdefault(function.id, []).append(target)

    def _conversion(self, node, stack):
        """Judges an object at `node` that is used as one in another address space."""
        cast, above = stack[-3:-1][::-1] if len(stack) > 2 else (None, None)
        if cast is None or above is None:
            return
        if cast.kind in _CASTS or cast.line.endswith(" part_of_explicit_cast"):
            self._cast(cast, node)
        if cast.kind != "ImplicitCastExpr":
            return
        if not cast.line.endswith("<AddressSpaceConversion>"):
            return
        to, source = cast.type, node.type
        if above.kind == "MemberExpr":
            method = _MENTION.search(above.line)
            if method and "__generic" in to and _CONSTANT.search(source):
                self.conversions.append((method[2], cast.place))
        elif above.kind == "CXXOperatorCallExpr" and above.children == 2:
            return  # this is the object of an operator that is a method
        elif "__global_device" in source and _CONSTANT.search(to):
            self._find(cast.place, "address-space", "what is in device is used as if it were in constant")

    def _cast(self, cast, node):
        """Judges a cast that is written. Clang lets it go between `constant` and `device`, and to no address space."""
        if "<AddressSpaceConversion>" not in cast.line:
            return
        to, source = cast.type, node.type
        if re.search(r"__generic (?![*&])[^&*]*[*&]", to) and node.name != "this":
            self._find(cast.place, "address-space", f"a cast to '{in_msl(to)}', which has no address space")
        for a, b in ((to, source), (source, to)):
            if "__global_device" in a and _CONSTANT.search(b):
                self._find(cast.place, "address-space", f"a cast from '{in_msl(source)}' to '{in_msl(to)}'")

    def finish(self):
        for function, variables in self.variables.items():
            size = sum(self.bytes.get(variable, 0) for variable in variables)
            if size > MAX_THREADGROUP_MEMORY and function in self.functions:
                node = self.functions[function]
                message = (
                    f"kernel '{node.name}' has {size} bytes of threadgroup variables; "
                    f"{MAX_THREADGROUP_MEMORY} is the limit"
                )
                self._find(node.place, "threadgroup-memory", message)
        for method, place in self.conversions:
            if method in self.functions:
                message = f"'{self.functions[method].name}' is called on an object in constant, and is not qualified so"
                self._find(place, "address-space", message)
        for name, place in self._recursive():
            self._find(place, "recursion", f"'{name}' calls itself")
        return sorted(self.findings)

    def _recursive(self):
        """Yields (name, place) of every function that can reach itself."""
        graph = {}
        for caller, callees in self.calls.items():
            graph.setdefault(self.first.get(caller, caller), set()).update(self.first.get(c, c) for c in callees)
        for function in graph:
            reached, pending = set(), list(graph[function])
            while pending:
                at = pending.pop()
                if at not in reached:
                    reached.add(at)
                    pending.extend(graph.get(at, ()))
            if function in reached and function in self.functions:
                yield self.functions[function].name, self.functions[function].place


def tree_findings(lines, lenient: Collection[tuple[str, int]] = ()):
    """Returns findings in the lines of a syntax tree.

    Args:
        lenient: places {(file, line)} where a reference may be in no address space; see clang_text().
    """
    tree = _Tree(lenient)
    tree.read(lines)
    return tree.finish()
