"""The bytes that one entry of a vocabulary stands for.

Owns the two spellings in use: byte-level BPE, which writes every byte as one printable character,
and SentencePiece, which writes a space as U+2581 and a lone byte as <0x0A>. Pure.
"""

import re

_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[str, int]:
    """Printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


class ByteTable:
    def __init__(self, *, byte_level: bool) -> None:
        self._table = _byte_level_table() if byte_level else None

    def of(self, token: str) -> bytes:
        """token: as the vocabulary spells it. Special tokens are spelt as they are read."""
        if self._table is not None:
            known = [self._table.get(character) for character in token]
            if None not in known:
                return bytes(byte for byte in known if byte is not None)
            return token.encode()
        lone = _LONE_BYTE.fullmatch(token)
        return bytes([int(lone[1], 16)]) if lone else token.replace("\u2581", " ").encode()
