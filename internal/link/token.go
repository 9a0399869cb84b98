// SPDX-License-Identifier: Apache-2.0

package link

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/internal/config/trust"
)

const (
	minToken     = 32   // bytes of text
	maxTokenFile = 4096 // bytes
	redacted     = "[redacted]"
)

// Token is the secret that both ends of a link share. The zero Token is none.
// It prints as "[redacted]" whatever the verb, and marshals so.
type Token struct{ key string }

// NewToken returns a token of text, which must have at least 32 bytes.
func NewToken(text string) (Token, error) {
	text = strings.TrimSpace(text)
	if len(text) < minToken {
		return Token{}, fmt.Errorf("token of %d bytes: want at least %d; remove the file to have one made", len(text), minToken)
	}
	return Token{text}, nil
}

// IsZero reports whether there is no token.
func (t Token) IsZero() bool { return t.key == "" }

// Derive returns another secret for a purpose, fit for a URL. It does not reveal the token.
func (t Token) Derive(purpose string) string {
	m := hmac.New(sha256.New, []byte(t.key))
	m.Write([]byte("fairlead " + purpose))
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// Format implements fmt.Formatter without showing the token.
func (t Token) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, redacted) }

// LogValue implements slog.LogValuer without showing the token.
func (t Token) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText implements encoding.TextMarshaler without showing the token.
func (t Token) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// LoadToken reads a token from a file. It refuses a file that others may read
// (on Windows, by its access list) or replace, or that belongs to another user, and a
// token that is too short. A missing file is fs.ErrNotExist.
func LoadToken(path string) (Token, error) {
	t, err := loadToken(path)
	if err != nil {
		return Token{}, fmt.Errorf("load token: %w", err)
	}
	return t, nil
}

func loadToken(path string) (t Token, err error) {
	f, err := openToken(path)
	if err != nil {
		return Token{}, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	fi, err := f.Stat()
	if err != nil {
		return Token{}, err
	}
	if !fi.Mode().IsRegular() {
		return Token{}, fmt.Errorf("%s is not a regular file", path)
	}
	if err := privateFile(path, fi); err != nil {
		return Token{}, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxTokenFile+1))
	if err != nil {
		return Token{}, err
	}
	if len(b) > maxTokenFile {
		return Token{}, fmt.Errorf("%s is larger than %d bytes: not a token", path, maxTokenFile)
	}
	if t, err = NewToken(string(b)); err != nil {
		return Token{}, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// LoadOrCreateToken reads a token as LoadToken does. If there is no file it
// makes one, mode 0600, with 32 random bytes in hex; the directory is made with
// mode 0700 if need be. Of two processes that do so at once, one makes it.
func LoadOrCreateToken(path string) (Token, error) {
	t, err := loadToken(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = createToken(path); err == nil || errors.Is(err, fs.ErrExist) {
			t, err = loadToken(path)
		}
	}
	if err != nil {
		return Token{}, fmt.Errorf("load or create token: %w", err)
	}
	return t, nil
}

// StoreToken keeps a token that another machine made, for the current user
// alone: mode 0600 or the like access list, in a directory made with mode 0700
// if need be. It replaces what is there in one step.
func StoreToken(path, text string) error {
	t, err := NewToken(text)
	if err == nil {
		err = writeToken(path, t.key, os.Rename)
	}
	if err != nil {
		return fmt.Errorf("store token: %w", err)
	}
	return nil
}

// createToken never puts its token over another.
func createToken(path string) error {
	var key [32]byte
	if _, err := rand.Read(key[:]); err != nil {
		return err
	}
	return writeToken(path, hex.EncodeToString(key[:]), os.Link)
}

// writeToken puts the file in place in one step, so that no reader sees half of
// it, and restricts it before the token is in it.
func writeToken(path, key string, place func(from, to string) error) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := trustedDir(dir); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".token-*") // mode 0600
	if err != nil {
		return err
	}
	if err := restrict(f.Name()); err != nil {
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return trust.Place(f, []byte(key+"\n"), path, place)
}
