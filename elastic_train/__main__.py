"""`python -m elastic_train CONFIG [--key value ...]`: the target of torchrun, and a world of one without it."""

from rendezvous.agent.worker_end import announce

announce()  # before the imports: whatever ends this process with 0 until the job is done is a failure

from elastic_train.cli.main import main_train  # noqa: E402

if __name__ == "__main__":
    main_train()
