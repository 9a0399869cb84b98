// SPDX-License-Identifier: Apache-2.0

// Package pair gives a host the token of a guest's agent. It fetches the token through
// the channel that the guest's administrator has anyway: WSL, limactl, virsh, podman
// or ssh.
package pair

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/fairlead/fairlead/internal/link"
)

// maxToken is longer than any token, in bytes.
const maxToken = 4096

// Channel reads files of a guest as its administrator does.
type Channel interface {
	// Check returns an error about a name that no guest has, such as one that a program
	// would take for an option, or a shell for a command.
	Check() error
	// Read returns a file that only root may read, at most a little more than
	// maxToken of it, of a guest that Check accepts. The error names the command, how it ended, and what to do.
	Read(ctx context.Context, file string) ([]byte, error)
}

// guestFile is a path that no shell changes, as ssh passes it to one in the guest.
var guestFile = regexp.MustCompile(`^/[A-Za-z0-9._/+-]+$`)

// Fetch reads the token of a guest's agent from a file in the guest, and stores it in a
// file of this machine for the current user only. No error contains the token.
func Fetch(ctx context.Context, c Channel, guest, file string) error {
	if !guestFile.MatchString(guest) {
		return fmt.Errorf("pair: file %q in the guest: want an absolute path of letters, digits and ._/+-", guest)
	}
	if err := c.Check(); err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	b, err := c.Read(ctx, guest)
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	return store(file, b)
}

// Take stores a token that another channel brought.
func Take(r io.Reader, file string) error {
	b, err := io.ReadAll(io.LimitReader(r, maxToken+1))
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	return store(file, b)
}

// token is one line of printable characters. How long it must be, package link knows.
var token = regexp.MustCompile(`^[!-~]+$`)

func store(file string, b []byte) error {
	text := strings.TrimSpace(string(b))
	switch {
	case file == "":
		return errors.New("pair: no file to store the token in: give --link-token FILE")
	case len(b) > maxToken:
		return fmt.Errorf("pair: more than %d bytes: that is no token", maxToken)
	case text == "":
		return errors.New("pair: the token is empty: is it the right file?")
	case !token.MatchString(text):
		return errors.New("pair: that is no token, which is one line of printable characters: does the guest print something at each login?")
	}
	return link.StoreToken(file, text)
}

// Open opens the argument of --from: a file, or "-" for standard input.
func Open(from string, stdin io.Reader) (io.ReadCloser, error) {
	if from == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(from)
}
