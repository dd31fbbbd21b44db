"""`python -m slangvi` is the same as `slangvi`."""

from slangvi.cli import main

if __name__ == "__main__":
    main()
