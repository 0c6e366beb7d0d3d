"""The steps of a reshard: select, prepare, execute; alone or shared by ranks."""
