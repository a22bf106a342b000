"""Programs for those who work on metalcore. No part of the package."""
