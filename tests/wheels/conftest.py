"""Makes the checkout's tools importable. What is installed comes first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
