"""Makes collector_fakes and web_certificates importable: pytest's importlib mode leaves test folders off the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "web"))
