"""Values of the library to words and tables. Nothing here prints, and no verb decides anything here."""
