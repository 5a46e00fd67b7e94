"""`python -m elastic_train CONFIG [--key value ...]`: the target of torchrun, and a world of one without it."""

from elastic_train.cli.main import main_train

if __name__ == "__main__":
    main_train()
