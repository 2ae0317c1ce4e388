"""`python -m campaign`."""

from campaign.cli import main

if __name__ == "__main__":
    main()
