#!/usr/bin/perl
# unicode: writes src/grammar/unicode_ranges.inc, the characters of \p{...} in patterns, from this Perl's Unicode data.
#
# One row is (first, last, step): capital letters often alternate with small ones, so a step of 2 saves most of the
# table. Run it only when the Unicode version should change: perl scripts/unicode.pl >src/grammar/unicode_ranges.inc
use strict;
use warnings;
use Unicode::UCD;

my @names = qw(L Lu Ll M N Nd P S Z Han Hiragana Katakana Hangul Bopomofo Latin Greek Cyrillic Arabic Hebrew Thai Devanagari);

sub rows {
    my ($name) = @_;
    my $property = length($name) <= 2 ? qr/\p{gc=$name}/ : qr/\p{Script=$name}/;
    my @rows;
    for my $c (0 .. 0x10FFFF) {
        next if $c >= 0xD800 && $c <= 0xDFFF || chr($c) !~ $property;
        my $last = $rows[-1];
        if ($last && $last->[0] == $last->[1] && $c - $last->[1] <= 2) {
            ($last->[1], $last->[2]) = ($c, $c - $last->[1]);
        } elsif ($last && $c - $last->[1] == $last->[2]) {
            $last->[1] = $c;
        } else {
            push @rows, [$c, $c, 1];
        }
    }
    return @rows;
}

printf "/* Unicode %s, written by scripts/unicode.pl: {first, last, step}. */\n", Unicode::UCD::UnicodeVersion();
my @table;
for my $name (@names) {
    my @rows = rows($name);
    push @table, sprintf("    {\"%s\", rows_%s, %d},\n", $name, $name, scalar @rows);
    print "static const struct stride rows_$name\[] = {\n";
    while (my @some = splice @rows, 0, 5) {
        print "    ", join(" ", map { sprintf "{0x%X, 0x%X, %d},", @$_ } @some), "\n";
    }
    print "};\n";
}
print "static const struct property properties[] = {\n", @table, "};\n";
