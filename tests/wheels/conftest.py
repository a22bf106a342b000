"""Makes the checkout's tools importable. Installed packages come first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
