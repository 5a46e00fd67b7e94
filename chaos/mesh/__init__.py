"""The third executor: a scenario's faults as Chaos Mesh objects, for jobs that run in Kubernetes."""
