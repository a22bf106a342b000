"""Reads Mach-O files (arm64): load commands, exported and imported symbols, code signature, Objective-C protocols."""

import hashlib
import mmap
import struct
from pathlib import Path

_ARM64 = 0x0100000C
_FAT, _FAT64 = 0xCAFEBABE, 0xCAFEBABF
_MAGIC64 = 0xFEEDFACF
_LC_SYMTAB, _LC_DYSYMTAB, _LC_ID_DYLIB, _LC_SEGMENT, _LC_CODE_SIGNATURE = 0x2, 0xB, 0xD, 0x19, 0x1D
_LC_DYLD_INFO, _LC_RPATH, _LC_EXPORTS_TRIE, _LC_BUILD_VERSION = 0x22, 0x8000001C, 0x80000033, 0x32
_LC_CHAINED_FIXUPS = 0x80000034
_LOAD_DYLIB = {0xC, 0x80000018, 0x8000001F, 0x20, 0x80000023}  # plain, weak, re-exported, lazy, upward
_REQUIRED = 0x80000000
_TWO_LEVEL = 0x80
DYLIB, BUNDLE = 6, 8
PLATFORM_MACOS = 1


class MachO:
    """One arm64 image, by itself or in a universal file. ValueError is raised for any other file."""

    def __init__(self, path):
        self.path = Path(path)
        with open(path, "rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._base = self._arm64_slice()
        magic, _, _, self.filetype, count, _, self.flags, _ = self._unpack("<8I", 0)
        if magic != _MAGIC64:
            raise ValueError(f"{path} is not a 64-bit Mach-O file")
        self.install_name = self.minimum_macos = self.platform = None
        self.dylibs, self.rpaths = [], []
        self._segments, self._sections = [], {}
        self._trie = self._symbols = self._signature = self._undefined = None
        self._chained = False
        offset = 32
        for _ in range(count):
            command, size = self._unpack("<2I", offset)
            self._load_command(command, offset, size)
            offset += size

    def _arm64_slice(self):
        magic, count = struct.unpack_from(">2I", self._file)
        if magic not in (_FAT, _FAT64):
            return 0
        layout = ">5I" if magic == _FAT else ">2I2QII"
        for i in range(count):
            cpu, _, offset, *_ = struct.unpack_from(layout, self._file, 8 + i * struct.calcsize(layout))
            if cpu == _ARM64:
                return offset
        raise ValueError(f"{self.path} has no arm64 part")

    def _unpack(self, layout, offset):
        return struct.unpack_from(layout, self._file, self._base + offset)

    def _bytes(self, offset, size):
        return self._file[self._base + offset : self._base + offset + size]

    def _string(self, offset):
        start = self._base + offset
        return self._file[start : self._file.find(b"\0", start)].decode()

    def _load_command(self, command, offset, size):
        if command in _LOAD_DYLIB or command == _LC_ID_DYLIB:
            name = self._string(offset + self._unpack("<I", offset + 8)[0])
            if command == _LC_ID_DYLIB:
                self.install_name = name
            else:
                self.dylibs.append(name)
        elif command == _LC_RPATH:
            self.rpaths.append(self._string(offset + self._unpack("<I", offset + 8)[0]))
        elif command == _LC_BUILD_VERSION:
            self.platform, version = self._unpack("<2I", offset + 8)
            self.minimum_macos = (version >> 16, version >> 8 & 255)
        elif command == _LC_SYMTAB:
            self._symbols = self._unpack("<4I", offset + 8)
        elif command == _LC_DYSYMTAB:
            self._undefined = self._unpack("<2I", offset + 24)
        elif command == _LC_CODE_SIGNATURE:
            self._signature = self._unpack("<2I", offset + 8)
        elif command == _LC_EXPORTS_TRIE:
            self._trie = self._unpack("<2I", offset + 8)
        elif command & ~_REQUIRED == _LC_DYLD_INFO and not self._trie:
            self._trie = self._unpack("<10I", offset + 8)[8:]
        elif command == _LC_CHAINED_FIXUPS:
            self._chained = True
        elif command == _LC_SEGMENT:
            name, address, _, start, length, _, _, sections, _ = self._unpack("<16s4Q4I", offset + 8)
            self._segments.append((name.rstrip(b"\0"), address, start, length))
            for i in range(sections):
                section, _, at, length = self._unpack("<16s16s2Q", offset + 72 + 80 * i)
                self._sections[section.rstrip(b"\0").decode()] = (at, length)

    # Symbols ----------------------------------------------------------------------------------------------------------

    def imports(self):
        """Returns {symbol: install name of the library that it is bound to, or None where any loaded image may have
        it}."""
        imported = {}
        first, count = self._undefined
        table, _, strings, _ = self._symbols
        for i in range(first, first + count):
            name, _, _, description, _ = self._unpack("<IBBHQ", table + 16 * i)
            ordinal = description >> 8
            two_level = self.flags & _TWO_LEVEL and 0 < ordinal <= len(self.dylibs)
            imported[self._string(strings + name)] = self.dylibs[ordinal - 1] if two_level else None
        return imported

    def exports(self):
        """Returns the exported symbols."""
        if not self._trie or not self._trie[1]:
            return set()
        trie, found, pending = self._bytes(*self._trie), set(), [(0, b"")]
        while pending:
            at, prefix = pending.pop()
            size, at = _uleb128(trie, at)
            if size:
                found.add(prefix.decode())
            at += size
            children, at = trie[at], at + 1
            for _ in range(children):
                end = trie.index(b"\0", at)
                child, after = _uleb128(trie, end + 1)
                pending.append((child, prefix + trie[at:end]))
                at = after
        return found

    def has_selector(self, name):
        """Returns whether an Objective-C method of this name is sent or implemented here."""
        at, size = self._sections.get("__objc_methname", (0, 0))
        names = self._bytes(self._offset(at), size) if size else b""
        return b"\0" + name.encode() + b"\0" in b"\0" + names

    # Code signature ---------------------------------------------------------------------------------------------------

    def signature_problem(self):
        """Returns what is wrong with the code signature: None, or words. An ad-hoc one is right where every page
        matches."""
        if not self._signature:
            return "there is none, and macOS runs no unsigned arm64 code"
        start, size = self._signature
        blob = self._bytes(start, size)
        _, _, count = struct.unpack_from(">3I", blob)
        for i in range(count):
            kind, at = struct.unpack_from(">2I", blob, 12 + 8 * i)
            if kind == 0:
                return self._code_directory_problem(blob[at:], start)
        return "it has no code directory"

    def _code_directory_problem(self, directory, end):
        header = struct.unpack_from(">9I4B", directory)
        flags, hashes, slots, limit, hash_size, page_bits = (header[i] for i in (3, 4, 7, 8, 9, 12))
        if not flags & 2:
            return "it is not ad-hoc"
        if limit != end:
            return f"it covers {limit} of {end} bytes"
        for i in range(slots):
            start = i << page_bits
            page = self._bytes(start, min(1 << page_bits, limit - start))
            known = directory[hashes + i * hash_size : hashes + (i + 1) * hash_size]
            if hashlib.sha256(page).digest()[:hash_size] != known:
                return f"page {i} is not what was signed"
        return None

    # Objective-C ------------------------------------------------------------------------------------------------------

    def protocols(self):
        """Returns {protocol: ({inherited protocols}, {(kind, selector): type encoding})}, kind being "-" or "+"."""
        address, size = self._sections.get("__objc_protolist", (0, 0))
        protocols = {}
        for i in range(size // 8):
            protocol = self._pointer(address + 8 * i)
            if protocol:
                methods = {}
                for field, kind in ((24, "-"), (32, "+"), (40, "-"), (48, "+")):  # required, then optional
                    methods.update(self._methods(self._pointer(protocol + field), kind))
                protocols[self._name_of(protocol)] = (self._inherited(self._pointer(protocol + 16)), methods)
        return protocols

    def _offset(self, address):
        for _, start, offset, length in self._segments:
            if start <= address < start + length:
                return offset + address - start
        raise ValueError(f"{self.path}: nothing lies at {address:#x}")

    def _pointer(self, address):
        (value,) = self._unpack("<Q", self._offset(address))
        if not self._chained:
            return value
        if value >> 63:  # bound at load time: not in this image
            return 0
        target = value & 0xFFFFFFFFF
        text = next(start for name, start, _, _ in self._segments if name == b"__TEXT")
        return target if not target or target >= text > 0 else target + text

    def _text(self, address):
        return self._string(self._offset(address))

    def _name_of(self, protocol):
        return self._text(self._pointer(protocol + 8))

    def _inherited(self, table):
        if not table:
            return set()
        (count,) = self._unpack("<Q", self._offset(table))
        pointers = [self._pointer(table + 8 + 8 * i) for i in range(count)]
        return {self._name_of(pointer) for pointer in pointers if pointer}

    def _methods(self, table, kind):
        if not table:
            return {}
        flags, count = self._unpack("<2I", self._offset(table))
        strings = {}
        for i in range(count):
            entry = table + 8 + i * (flags & 0xFFFC)
            if flags >> 31:  # relative method lists
                selector, types = self._unpack("<2i", self._offset(entry))
                name, encoding = self._text(self._pointer(entry + selector)), self._text(entry + 4 + types)
            else:
                name, encoding = self._text(self._pointer(entry)), self._text(self._pointer(entry + 8))
            strings[kind, name] = encoding
        return strings


def _uleb128(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
