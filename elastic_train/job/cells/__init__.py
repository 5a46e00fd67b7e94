"""The applied state of a rank that holds a place in a cell: a part of a replica, of which other cells have copies."""
