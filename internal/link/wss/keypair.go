// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"crypto/tls"
	"os"
	"sync"
	"time"
)

// keyPair is a certificate that is read again when one of its files changes.
type keyPair struct {
	cert, key string

	mu    sync.Mutex
	pair  *tls.Certificate
	state [2]fileState
}

// fileState tells whether a file changed.
type fileState struct {
	size int64
	time time.Time
}

// get is for tls.Config.GetCertificate. While the new files cannot be read together,
// as during a renewal, the old certificate is used.
func (k *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	state := [2]fileState{stateOf(k.cert), stateOf(k.key)}
	if k.pair != nil && state == k.state {
		return k.pair, nil
	}
	pair, err := tls.LoadX509KeyPair(k.cert, k.key)
	if err == nil {
		k.pair, k.state = &pair, state
	}
	if k.pair != nil {
		return k.pair, nil
	}
	return nil, err
}

func stateOf(file string) fileState {
	fi, err := os.Stat(file)
	if err != nil {
		return fileState{}
	}
	return fileState{fi.Size(), fi.ModTime()}
}
