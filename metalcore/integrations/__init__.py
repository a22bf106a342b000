"""Support for other libraries: metalcore.integrations.transformers."""
