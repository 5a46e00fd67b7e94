"""What the operating system and other libraries need from us: signals, locks, threads, files, failpoints."""
