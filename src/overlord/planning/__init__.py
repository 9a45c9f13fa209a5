"""What goes where at step t (paper section 4). Pure: numbers in, numbers out."""
