"""metalcore in other libraries: metalcore.integrations.transformers."""
