"""`python -m specjax` is the command `specjax`."""

from specjax.cli import main

if __name__ == "__main__":
    main()
