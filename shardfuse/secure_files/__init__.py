"""Files that only this user can have written: what is kept between processes, and loaded again.

`folder` opens folders that nobody else can enter. `sealed` keeps files whose content a key of the user vouches for.
What this is for, and what it does not protect against: docs/security.md.
"""

from .folder import open_folder, read_private, write_private
from .sealed import fresh_folder, keep_text, read_sealed, write_sealed

__all__ = [
    "fresh_folder",
    "keep_text",
    "open_folder",
    "read_private",
    "read_sealed",
    "write_private",
    "write_sealed",
]
