// The collisions that it is known for are tools/mac_check's business.
