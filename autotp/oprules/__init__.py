"""What each op allows: the notation, the reader of rules/, and rules derived or discovered."""
