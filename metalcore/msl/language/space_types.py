"""Templates that are specialized for pointers into address spaces: `struct is_far<device T*>`.

In the arguments of such a template a pointer keeps its address space, as a type: `msl::spaced<msl::in_device, T*>`. A
pointer whose space is not written there, such as one that a function's template deduced, has no space any more; then
the template does not compile, so that no wrong specialization is taken.
"""

from ..errors import error_at
from .declarators import DeclarationReader
from .duplicates import template_names
from .tokens import matching_angle

_STANDARD = {"is_same", "is_same_v"}
# Spaces that need no types if the specializations for all of them are the same. Pointers to constant are to const too.
_ALL = {"device", "threadgroup", "thread"}


class SpaceTypes:
    """The address spaces in the arguments of such templates. It must be made before the address spaces are erased."""

    def __init__(self, program):
        self.program = program
        self.reader = DeclarationReader(program)
        self.templates = self._specialized()
        self.named = {d.name_at: d for d in program.walk() if d.is_template and d.name_at is not None}
        self.wrapped, self.generic = [], []
        for i, token in enumerate(program.tokens):
            if token.text in self.templates or token.text in _STANDARD:
                if program.tokens[i + 1].text == "<" and program.tokens[i - 1].text not in (".", "->"):
                    self._arguments(i)

    def _specialized(self):
        """Returns the names of the program's templates that are specialized for address spaces, with the positions of
        those arguments."""
        found, contents = {}, {}
        for declaration in self.program.walk():
            at = declaration.name_at
            if declaration.kind not in ("class", "variable") or not declaration.is_template or at is None:
                continue
            if self.program.tokens[at + 1].text != "<":
                continue
            close = matching_angle(self.program.tokens, at + 1)
            for position, part in enumerate(self.program.split_parameters(at + 1, close)):
                space = self._space(*part)
                if space:
                    found.setdefault(declaration.name, set()).add(position)
                    content = contents.setdefault((declaration.scope, declaration.name), {})
                    content.setdefault(self._content(declaration, close), set()).add(space)
        for (_, name), content in contents.items():
            if len(content) == 1 and next(iter(content.values())) >= _ALL:
                found.pop(name, None)
        return found

    def _content(self, declaration, close):
        names = template_names(self.program, declaration)
        words = (token.text for token in self.program.tokens[close + 1 : declaration.last])
        return tuple(names.get(word, word) for word in words)

    def _space(self, first, last):
        """Returns the address space that a template's argument names, or None."""
        tokens, declaration = self.program.tokens, self.reader.read(first)
        spaces = [i for i in declaration.spaces if i < last]
        spaces += [s for d in declaration.declarators[:1] for s in d.spaces if s < last]
        if len({tokens[i].text for i in spaces}) > 1:
            raise error_at(
                tokens[first],
                "several address spaces in one argument of a template that is specialized "
                "for address spaces are not supported",
            )
        return tokens[spaces[0]].text if spaces else None

    def _arguments(self, i):
        tokens, name = self.program.tokens, self.program.tokens[i].text
        close = matching_angle(tokens, i + 1)
        if close is None:
            return
        specialization = self.named.get(i)
        for position, (first, last) in enumerate(self.program.split_parameters(i + 1, close)):
            space = self._space(first, last)
            if space:
                self.wrapped.append((first, last, space))
            elif specialization is not None and position in self.templates.get(name, ()):
                if any(token.text == "*" for token in tokens[first:last]):
                    self.wrapped.append((first, last, None))
                    self.generic.append(specialization.templates[-1])

    def write(self):
        """Writes the types. It must be called after the address spaces are erased."""
        tokens = self.program.tokens
        for first, last, space in self.wrapped:
            place = f"msl::in_{space}" if space else "msl_space"
            tokens[first].text = f"msl::spaced<{place}, {tokens[first].text}"
            tokens[last - 1].text += ">"
        for opening, closing in self.generic:
            empty = closing == opening + 1
            tokens[opening].text += "class msl_space" + ("" if empty else ", ")
        for declaration in list(self.program.walk()):
            positions = self.templates.get(declaration.name)
            if positions and self._is_primary(declaration):
                tokens[declaration.last - 1].text += self._guards(declaration, positions)

    def _is_primary(self, declaration):
        tokens, at = self.program.tokens, declaration.name_at
        return (
            declaration.is_template
            and at is not None
            and tokens[at + 1].text != "<"
            and (declaration.kind == "class" or declaration.kind == "variable")
        )

    def _guards(self, declaration, positions):
        """Adds specializations for pointers without an address space, which do not compile."""
        program, (opening, closing) = self.program, declaration.templates[-1]
        parts = program.split_parameters(opening, closing)
        texts = []
        for position in sorted(positions):
            parameters, arguments = [], []
            for i, (first, last) in enumerate(parts):
                end = next((j for j in range(first, last) if program.tokens[j].text == "="), last)
                if i == position:
                    parameters.append("class msl_pointee")
                    arguments.append("msl_pointee*")
                else:
                    name = f"msl_{i}"
                    pack = "..." if "..." in program.text(first, end) else ""
                    named = program.declarator_name(first, end)
                    kind = program.text(first, end if named is None else named).replace("...", "")
                    kind = "class" if kind.startswith(("typename", "class")) else kind
                    parameters.append(f"{kind}{pack} {name}")
                    arguments.append(name + pack)
            head = f" template <{', '.join(parameters)}> "
            specialized = f"{declaration.name}<{', '.join(arguments)}>"
            words = {token.text for token in program.tokens[declaration.head : declaration.name_at]}
            if words & {"struct", "class", "union"}:
                texts.append(f"{head} struct {specialized} : msl::unknown_space<msl_pointee> {{}};")
            else:
                type_ = program.text(declaration.head, declaration.name_at)
                texts.append(f"{head} {type_} {specialized} = msl::unknown_space<msl_pointee>::value;")
        return "".join(texts)
