"""pack_corpus.py FOLDER ARCHIVE: the kept inputs of a fuzz target as one zip.

The same files give the same bytes, on any machine: sorted names, one time, nothing compressed (git
compresses what it stores). `python3 -m zipfile -e ARCHIVE FOLDER` unpacks it.
"""

import sys
from pathlib import Path
from zipfile import ZipFile, ZipInfo

with ZipFile(sys.argv[2], "w") as archive:
    for path in sorted(Path(sys.argv[1]).iterdir()):
        archive.writestr(ZipInfo(path.name), path.read_bytes())
