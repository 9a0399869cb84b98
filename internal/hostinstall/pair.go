// SPDX-License-Identifier: Apache-2.0

// Package hostinstall prepares a host for its user: it fetches the token of a guest,
// and has the host peer started when the user logs on.
package hostinstall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/hvsock"
	"github.com/fairlead/fairlead/internal/link"
)

// maxToken is longer than any token, in bytes.
const maxToken = 4096

// PairOptions say where a token comes from and where it goes.
type PairOptions struct {
	// WSL returns what wsl.exe prints with these arguments (hvsock.RunWSL).
	WSL func(ctx context.Context, args ...string) ([]byte, error)
	// Distribution of WSL; empty means the default one.
	Distribution string
	// GuestFile is the token's file in the guest.
	GuestFile string
	// From, if given, is read instead of WSL.
	From io.Reader
	// File is where the token is stored on this machine.
	File string
}

// Pair fetches the token of a guest's agent and stores it for the current user only.
// No error contains the token.
func Pair(ctx context.Context, o PairOptions) error {
	if o.File == "" {
		return errors.New("pair: no file to store the token in: give --link-token FILE")
	}
	text, err := o.fetch(ctx)
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	return link.StoreToken(o.File, text)
}

func (o PairOptions) fetch(ctx context.Context) (string, error) {
	if o.From != nil {
		b, err := io.ReadAll(io.LimitReader(o.From, maxToken))
		return string(b), err
	}
	args := []string{"--user", "root", "--exec", "cat", o.GuestFile}
	if o.Distribution != "" {
		args = append([]string{"--distribution", o.Distribution}, args...)
	}
	out, err := o.WSL(ctx, args...)
	if err == nil {
		return string(bytes.TrimSpace(out[:min(len(out), maxToken)])), nil
	}
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("WSL is not installed here: %w: pass the token in with --from FILE", err)
	}
	var output string
	if lines := hvsock.Lines(out); len(lines) > 0 { // of wsl.exe: cat's would have been the token
		output = ": " + strconv.Quote(strings.Join(lines, " "))
	}
	return "", fmt.Errorf("read %s as root in WSL: %w%s: start the agent there once, which creates the file", o.GuestFile, err, output)
}

// OpenToken opens the argument of --from: a file, or "-" for standard input.
func OpenToken(from string, stdin io.Reader) (io.ReadCloser, error) {
	if from == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(from)
}
