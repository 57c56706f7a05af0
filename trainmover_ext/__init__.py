"""The C++ extension (built by setup.py from csrc/); its typed Python face lives here."""
