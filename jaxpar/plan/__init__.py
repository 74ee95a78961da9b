"""What a program will cost, and what the compiler really made of it. So far: reading compiled programs (`hlo`)."""
