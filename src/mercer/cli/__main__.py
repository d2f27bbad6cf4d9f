"""`python -m mercer.cli` is `mercer`."""

from mercer.cli.main import main

if __name__ == "__main__":
    main()
