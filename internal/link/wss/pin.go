// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
)

// Pin is the SHA-256 of a CA bundle in PEM, with LF line ends and exactly one at its
// end: what sha256sum prints for such a file. The zero Pin is none.
type Pin [sha256.Size]byte

// ParsePin reads 64 hexadecimal digits.
func ParsePin(s string) (p Pin, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(p) {
		return Pin{}, fmt.Errorf("%q: want a SHA-256 of 64 hexadecimal digits", s)
	}
	return Pin(b), nil
}

// PinOf returns the pin of a bundle, whatever its line ends.
func PinOf(bundle []byte) Pin { return sha256.Sum256(canonical(bundle)) }

// IsZero reports whether there is no pin.
func (p Pin) IsZero() bool { return p == Pin{} }

// String returns what ParsePin reads, "" for no pin.
func (p Pin) String() string {
	if p.IsZero() {
		return ""
	}
	return hex.EncodeToString(p[:])
}

// matches compares in constant time.
func (p Pin) matches(bundle []byte) bool {
	q := PinOf(bundle)
	return subtle.ConstantTimeCompare(p[:], q[:]) == 1
}

// canonical gives a bundle LF line ends, exactly one of which is at its end.
func canonical(bundle []byte) []byte {
	b := bytes.ReplaceAll(bundle, []byte("\r\n"), []byte("\n"))
	return append(bytes.TrimRight(b, "\n"), '\n')
}

// certificates reads the certificates of a bundle. Other blocks are left out.
func certificates(bundle []byte) (list []*x509.Certificate, err error) {
	for rest := bundle; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	if len(list) == 0 {
		return nil, errors.New("no certificate in PEM")
	}
	return list, nil
}

// bundleOf writes certificates, and nothing else, as a bundle.
func bundleOf(list []*x509.Certificate) []byte {
	var b bytes.Buffer
	for _, c := range list {
		_ = pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}) // a buffer takes all
	}
	return b.Bytes()
}

// poolOf returns certificates as roots.
func poolOf(list []*x509.Certificate) *x509.CertPool {
	pool := x509.NewCertPool()
	for _, c := range list {
		pool.AddCert(c)
	}
	return pool
}
