"""Many simulated jobs: seeds, cases, pools, ledgers, planted bugs and shrinking."""
