"""How the engine comes behind an unchanged script."""
