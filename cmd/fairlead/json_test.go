// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unicode"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// hostile are characters that control a terminal or hide text.
var hostile = []rune{0, '\n', 0x1b, 0x7f, 0x80, 0x9b, 0x9d, 0xa0, 0xad, 0x200b, 0x200e, 0x2028, 0x202e, 0x2066, 0xfeff, 0xfffd, 0xe0001, 0x10ffff}

// randomText mixes hostile characters, any others, and bytes that are not UTF-8.
func randomText(r *rand.Rand) string {
	var b strings.Builder
	for range r.IntN(20) {
		switch r.IntN(4) {
		case 0:
			b.WriteRune(hostile[r.IntN(len(hostile))])
		case 1:
			b.WriteRune(rune(r.IntN(unicode.MaxRune + 1)))
		case 2:
			b.WriteByte(byte(r.IntN(256)))
		default:
			b.WriteString(`a"\u009b<é>`)
		}
	}
	return b.String()
}

// What a guest chose is printable in all JSON, and is read back as encoding/json alone
// would write it.
func TestJSONIsPrintable(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		l := status.List{
			Publications: []status.Publication{{
				Fact: port.Fact{Owner: port.Owner{
					Kind: port.OwnerContainer, Name: randomText(r), Labels: map[string]string{randomText(r): randomText(r)},
				}},
				Reason: randomText(r),
			}},
			Sources: []status.Source{{Name: randomText(r)}},
		}
		var got, plain bytes.Buffer
		if err := newEncoder(&got).Encode(versioned(l)); err != nil {
			t.Fatal(err)
		}
		if err := json.NewEncoder(&plain).Encode(versioned(l)); err != nil {
			t.Fatal(err)
		}
		if i := bytes.IndexFunc(got.Bytes(), func(c rune) bool { return !unicode.IsPrint(c) }); i != got.Len()-1 {
			t.Fatalf("%q at %d is not printable", got.Bytes()[i:], i)
		}
		var a, b any
		if err := json.Unmarshal(got.Bytes(), &a); err != nil {
			t.Fatalf("%v in %s", err, got.Bytes())
		}
		if err := json.Unmarshal(plain.Bytes(), &b); err != nil || !reflect.DeepEqual(a, b) {
			t.Fatalf("%s is read as %v, want %v (%v)", got.Bytes(), a, b, err)
		}
	}
}

func TestLogIsPrintable(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		var b bytes.Buffer
		log, _ := logger(&b, config.Common{LogFormat: format})
		log.Info("x", "name", string(hostile))
		if line := strings.TrimSuffix(b.String(), "\n"); strings.ContainsFunc(line, func(c rune) bool { return !unicode.IsPrint(c) }) {
			t.Errorf("%s: %q", format, line)
		}
	}
}

// No command has an encoder of its own, and what each prints has a schema version.
func TestCommandsShareTheEncoder(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if f != "json.go" && !strings.HasSuffix(f, "_test.go") && strings.Contains(string(b), "json.NewEncoder") {
			t.Errorf("%s: use newEncoder", f)
		}
		if f != "json.go" && !strings.HasSuffix(f, "_test.go") && strings.Count(string(b), ".Encode(") != strings.Count(string(b), ".Encode(versioned(") {
			t.Errorf("%s: use versioned", f)
		}
	}
}

func TestEscaperReportsItsWriter(t *testing.T) {
	if n, err := (escaper{failing{}}).Write([]byte("{}")); n != 0 || err == nil {
		t.Error(n, err)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
