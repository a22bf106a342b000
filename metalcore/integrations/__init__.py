"""Support for other libraries: metalcore.integrations.transformers."""

import metalcore.overrides  # noqa: F401  (it and _modules import each other, and this order works)
